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
from typing import Any, NamedTuple

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


class Stretch(NamedTuple):
    """The times of one or more `phases` events that followed each other; the last one ended at `step`."""

    step: int
    time: RankTime
    """Without steps: what came after the last one."""


@dataclass
class Session:
    """What one process of a rank has logged, from its `start` on."""

    start: Mapping[str, Any] | None
    """None: its line is damaged."""
    begun_s: float
    """When its first event was written."""
    stretches: list[Stretch] = field(default_factory=list)


class WindowFold:
    """Takes the events of all ranks in, rank by rank or as they grow, and returns the windows.

    It keeps at most so many stretches of all ranks. Where there are more, steps that are no multiples of 2, then of 4,
    and so on, end a stretch no longer; ranks still have ends in common.
    """

    def __init__(self, max_stretches: int = 2**15) -> None:
        self._sessions: dict[int, list[Session]] = {}
        self._max_stretches, self._num_stretches = max_stretches, 0
        self._level = 0
        """Ends are multiples of 2^level."""

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take an event in; only `start` and `phases` matter."""
        sessions = self._sessions.setdefault(rank, [])
        if event["event"] == "start":
            sessions.append(Session(event, event["time"]))
        elif event["event"] == "phases":
            if not sessions:
                sessions.append(Session(None, event["time"]))
            start = sessions[-1].start or {}
            on_cpu = str(start.get("device", "cpu")).split(":")[0] == "cpu"
            sessions[-1].stretches.append(Stretch(event["step"], rank_time(event, on_cpu)))
            self._num_stretches += 1
            if self._num_stretches > self._max_stretches:
                self._shorten()

    def windows(self) -> list[Window]:
        """Return the windows so far; attempts are kept apart."""
        if not self._sessions:
            return []
        starts = [each.start for each in self._sessions[min(self._sessions)] if each.start is not None]
        attempts: dict[int, dict[int, list[Stretch]]] = {}
        for rank, sessions in sorted(self._sessions.items()):
            for each in sessions:
                start = each.start
                number = _begun_before(each.begun_s, starts) if start is None else _attempt_of(start, starts)
                if each.stretches:
                    attempts.setdefault(number, {}).setdefault(rank, []).extend(each.stretches)
        return [window for _, stretches in sorted(attempts.items()) for window in _aligned(stretches)]

    def _shorten(self) -> None:
        """Join stretches until half of what may be kept is left, or nothing can be joined any more."""
        while self._num_stretches > self._max_stretches // 2 and self._level < _MOST_LEVELS:
            self._level += 1
            sessions = [session for own in self._sessions.values() for session in own]
            for session in sessions:
                session.stretches = _joined(session.stretches, 2**self._level)
            self._num_stretches = sum(len(session.stretches) for session in sessions)
        if self._num_stretches > self._max_stretches // 2:  # so many sessions: each keeps one
            self._max_stretches *= 2


_MOST_LEVELS = 62


def _joined(stretches: Sequence[Stretch], every: int) -> list[Stretch]:
    """Join stretches, but for those that end at a multiple of `every`, the last one, and what follows the last step."""
    joined: list[Stretch] = []
    open_times: list[RankTime] = []
    for number, (step, time) in enumerate(stretches, 1):
        if not time.num_steps and open_times:
            joined.append(Stretch(stretches[number - 2].step, total(open_times)))
            open_times = []
        open_times.append(time)
        if not time.num_steps or not step % every or number == len(stretches):
            joined.append(Stretch(step, total(open_times)))
            open_times = []
    return joined


def windows_of(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Window]:
    """Return the windows of a run, from all ranks' events; attempts are kept apart."""
    fold = WindowFold()
    for rank, own in sorted(events.items()):
        for event in own:
            fold.take(rank, event)
    return fold.windows()


def _attempt_of(start: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> int:
    """Return which of rank 0's starts is of the same attempt: of those that are alike, the nearest; clocks differ."""
    alike = [
        number
        for number, other in enumerate(starts, 1)
        if (other["attempt"], other["world_size"]) == (start["attempt"], start["world_size"])
    ]
    if not alike:
        return _begun_before(start["time"], starts)
    return min(alike, key=lambda number: abs(float(starts[number - 1]["time"]) - start["time"]))


def _begun_before(time_s: float, starts: Sequence[Mapping[str, Any]]) -> int:
    return bisect_right([other["time"] for other in starts], time_s)


def _aligned(stretches: Mapping[int, Sequence[Stretch]]) -> list[Window]:
    """Return the windows of one attempt."""
    ends = [{step for step, time in own if time.num_steps} for own in stretches.values()]
    cuts = sorted(set.intersection(*ends))
    windows: dict[int, dict[int, list[RankTime]]] = {}
    for rank, own in stretches.items():
        for step, time in own:
            index = bisect_left(cuts, step) + (not time.num_steps)  # what comes after the last step
            windows.setdefault(index, {}).setdefault(rank, []).append(time)
    return [{rank: total(times) for rank, times in sorted(window.items())} for _, window in sorted(windows.items())]


def total(times: Iterable[RankTime]) -> RankTime:
    """Return the sum of times."""
    return reduce(RankTime.__add__, times, RankTime())
