"""Put the ranks' `phases` events side by side: windows of steps that all ranks have ended.

Ranks write their records at steps that are multiples of a power of two, each of its own, so some steps end a record on
every rank. Between two of these all ranks did the same steps, and their times can be compared, although their clocks
may differ.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

COMPUTING = ("forward", "backward", "optimizer", "other")
"""The phases in which a rank on CPU should compute all the time, and which are not a cause by themselves."""


@dataclass(frozen=True)
class RankTime:
    """What one rank did in a window."""

    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_samples: int = 0
    comm_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """How long the rank waited for others, or for a transfer."""
        return self.phases.get("communication", 0.0)

    def seconds_in(self, *phases: str) -> float:
        """Return the time in some phases."""
        return sum(self.phases.get(phase, 0.0) for phase in phases)

    def __add__(self, other: RankTime) -> RankTime:
        names = self.phases.keys() | other.phases.keys()
        return RankTime(
            self.seconds + other.seconds,
            {name: self.phases.get(name, 0.0) + other.phases.get(name, 0.0) for name in names},
            self.num_steps + other.num_steps,
            self.num_samples + other.num_samples,
            self.comm_bytes + other.comm_bytes,
            self.cpu_s + other.cpu_s,
        )


Window = Mapping[int, RankTime]
"""The times of all ranks that took part, by rank."""


def rank_time(event: Mapping[str, Any], on_cpu: bool) -> RankTime:
    """Return the times of a `phases` event, with two more phases on CPU.

    "delayed": ready to compute, but other threads and processes had the cores. "idle": in a phase of computation, and
    neither computing nor delayed: the rank slept, or waited for a lock or a file. Both are at most what is left of
    these phases when all of the process's computing was in them, and are taken out of them in proportion.
    """
    phases = {name: max(0.0, float(value)) for name, value in event["phases"].items()}
    cpu_s, delayed_s = float(event.get("cpu_s", 0.0)), float(event.get("delayed_s", 0.0))
    if on_cpu and delayed_s > 0:  # 0: the system does not count it
        unused_s = sum(phases.get(name, 0.0) for name in COMPUTING) - cpu_s
        taken_s = _take_out(phases, "delayed", min(delayed_s, unused_s))
        _take_out(phases, "idle", unused_s - taken_s)
    return RankTime(
        float(event["seconds"]),
        phases,
        event["num_steps"],
        event["num_samples"],
        int(event.get("comm_bytes", 0)),
        cpu_s,
    )


def _take_out(phases: dict[str, float], name: str, seconds: float) -> float:
    """Count up to so many seconds of computing phases as another one, of each in proportion; return how many."""
    total_s = sum(phases.get(phase, 0.0) for phase in COMPUTING)
    taken_s = min(max(0.0, seconds), total_s)
    if taken_s <= 0.0:
        return 0.0
    for phase in COMPUTING:
        if phase in phases:
            phases[phase] *= 1 - taken_s / total_s
    phases[name] = taken_s
    return taken_s


def windows_of(events: Mapping[int, Sequence[Mapping[str, Any]]], on_cpu: bool = True) -> list[Window]:
    """Return the windows of a run, from all ranks' events; attempts are kept apart."""
    if not events:
        return []
    starts = [event for event in events[min(events)] if event["event"] == "start"]
    attempts: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    for rank, own in events.items():
        number = None
        for event in own:
            if event["event"] == "start":
                number = _attempt_of(event, starts)
            elif event["event"] == "phases":
                of_event = _begun_before(event, starts) if number is None else number
                attempts.setdefault(of_event, {}).setdefault(rank, []).append(event)
    return [window for _, records in sorted(attempts.items()) for window in _aligned(records, on_cpu)]


def _attempt_of(start: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> int:
    """Return which of rank 0's starts is of the same attempt: of those that are alike, the nearest; clocks differ."""
    alike = [
        number
        for number, other in enumerate(starts, 1)
        if (other["attempt"], other["world_size"]) == (start["attempt"], start["world_size"])
    ]
    if not alike:
        return _begun_before(start, starts)
    return min(alike, key=lambda number: abs(float(starts[number - 1]["time"]) - start["time"]))


def _begun_before(event: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> int:
    return bisect_right([other["time"] for other in starts], event["time"])


def _aligned(records: Mapping[int, Sequence[Mapping[str, Any]]], on_cpu: bool) -> list[Window]:
    """Return the windows of one attempt."""
    ends = [{event["step"] for event in own if event["num_steps"]} for own in records.values()]
    cuts = sorted(set.intersection(*ends))
    windows: dict[int, dict[int, list[RankTime]]] = {}
    for rank, own in records.items():
        for event in own:
            index = bisect_left(cuts, event["step"]) + (not event["num_steps"])  # what comes after the last step
            windows.setdefault(index, {}).setdefault(rank, []).append(rank_time(event, on_cpu))
    return [{rank: total(times) for rank, times in sorted(window.items())} for _, window in sorted(windows.items())]


def total(times: Iterable[RankTime]) -> RankTime:
    """Return the sum of times."""
    return reduce(RankTime.__add__, times, RankTime())
