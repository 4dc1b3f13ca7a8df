"""What the time of a run went to, along its frontier.

[Note: The frontier]
In every window one rank is the furthest behind: the others wait for it, so it is the one that waits least. The run is
as fast as this rank, so the window's time is what this rank did: its phases, and its own wait, which no rank could
avoid: the cost of communication itself, but for what it waited while all others were kept from their cores. What this
rank needed longer than the others is its excess; without it the window would have been shorter by the time that the
others waited longer (with several others, their median). An excess in reading, saving or a hook is the cost of that; an
excess in computing is that of a slow rank. Excesses of ranks that take turns are noise, and cancel out: only what one
rank lost more often than the others counts as a slow rank's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from instep.monitor.bottleneck.windows import RankTime, Window, total

K = TypeVar("K")
_OWN_CAUSE = ("data", "copy", "checkpoint", "evaluation", "startup", "compile", "hooks")
"""Phases that are a cause by themselves, also on one rank."""
_HARDLY_ANY = 0.25


@dataclass(frozen=True)
class Frontier:
    """Seconds of the wall time by what they went to."""

    wall_s: float
    phases: Mapping[str, float]
    """By phase, along the frontier, without what a slow rank needed longer."""
    slow_rank: int | None
    slow_s: float
    """What the slow rank needed longer for computing than the others."""
    slow_phases: Mapping[str, float]
    """The same by phase."""
    uneven_s: float
    """What ranks needed longer than the others in turns."""
    excess: Mapping[str, Mapping[int, float]]
    """By phase and rank: what a rank alone needed there, while the others waited."""
    ranks: Mapping[int, RankTime]
    """The sums of each rank."""
    num_steps: int

    def seconds(self, *phases: str) -> float:
        """Return the time along the frontier in some phases."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    def rank_of(self, *phases: str) -> int | None:
        """Return the rank whose excess is most of the time in some phases; None: all ranks have their share.

        Where several ranks are slow in the same way, the last one hides what the others would need: while they wait
        for it, they read ahead. So a rank is named only if the others spend hardly any time there.
        """
        for rank, own in self.ranks.items():
            if sum(self.excess.get(phase, {}).get(rank, 0.0) for phase in phases) <= self.seconds(*phases) / 2:
                continue
            others = [time.seconds_in(*phases) for other, time in self.ranks.items() if other != rank]
            if others and statistics.median(others) < _HARDLY_ANY * own.seconds_in(*phases):
                return rank
        return None


def frontier_of(windows: Sequence[Window]) -> Frontier:
    """Return what the time of a run went to."""
    phases: dict[str, float] = {}
    excess: dict[str, dict[int, float]] = {}
    late: dict[int, dict[str, float]] = {}
    wall_s = 0.0
    for window in windows:
        critical = min(window, key=lambda rank: (window[rank].wait_s, rank))
        wall_s += window[critical].seconds
        for phase, seconds in window[critical].phases.items():
            _add(phases, phase, seconds)
        if (shared_s := _waiting_for_delayed(window, critical)) > 0:
            _add(phases, "communication", -shared_s)
            _add(phases, "delayed", shared_s)
        for phase, seconds in _excess(window, critical).items():
            if phase in _OWN_CAUSE:
                _add(excess.setdefault(phase, {}), critical, seconds)
            else:
                _add(phases, phase, -seconds)
                _add(late.setdefault(critical, {}), phase, seconds)
    slow_rank, slow_phases = _slow_rank(late)
    slow_s = sum(slow_phases.values())
    ranks = sorted({rank for window in windows for rank in window})
    return Frontier(
        wall_s,
        phases,
        slow_rank,
        slow_s,
        slow_phases,
        sum(sum(of_rank.values()) for of_rank in late.values()) - slow_s,
        excess,
        {rank: total(window[rank] for window in windows if rank in window) for rank in ranks},
        sum(max(time.num_steps for time in window.values()) for window in windows),
    )


def _add(sums: dict[K, float], key: K, seconds: float) -> None:
    sums[key] = sums.get(key, 0.0) + seconds


def _waiting_for_delayed(window: Window, critical: int) -> float:
    """Return how much of a rank's wait the others' waits for a core explain: that is not communication's."""
    delays = [time.phases.get("delayed", 0.0) for rank, time in window.items() if rank != critical]
    return min(window[critical].wait_s, min(delays)) if delays else 0.0


def _excess(window: Window, critical: int) -> dict[str, float]:
    """Return by phase what a rank needed longer than the others, altogether what they waited longer than it."""
    others = [time for rank, time in window.items() if rank != critical]
    if not others:
        return {}
    own = window[critical]
    lateness_s = statistics.median_low(other.wait_s for other in others) - own.wait_s
    differences = {
        phase: seconds - statistics.median(other.phases.get(phase, 0.0) for other in others)
        for phase, seconds in own.phases.items()
        if phase != "communication"
    }
    positive = {phase: seconds for phase, seconds in differences.items() if seconds > 0}
    total_s = sum(positive.values())
    if lateness_s <= 0 or total_s <= 0:
        return {}
    scale = min(1.0, lateness_s / total_s)
    return {phase: seconds * scale for phase, seconds in positive.items()}


def _slow_rank(late: Mapping[int, Mapping[str, float]]) -> tuple[int | None, Mapping[str, float]]:
    """Return the rank that was late most, and by how much more than all others together, by phase."""
    by_rank = {rank: sum(phases.values()) for rank, phases in late.items()}
    if not by_rank:
        return None, {}
    rank = max(by_rank, key=lambda rank: by_rank[rank])
    net = 2 * by_rank[rank] - sum(by_rank.values())
    if net <= 0:
        return None, {}
    return rank, {phase: seconds * net / by_rank[rank] for phase, seconds in late[rank].items()}
