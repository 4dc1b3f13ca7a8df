"""Where the time and the memory of a trace went, by operation. Pure: from the events of a trace to tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from instep.profile.trace import PHASE_PREFIX, Event

HOST_OPERATION, ANNOTATION = "cpu_op", "user_annotation"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what runs on a device; those of a stream do not overlap."""
_MEMORY = "[memory]"


class Slice(NamedTuple):
    """Something that took time on a thread, or on a stream of a device."""

    begin_us: float
    end_us: float
    name: str
    category: str

    @property
    def took_us(self) -> float:
        """Its duration."""
        return self.end_us - self.begin_us


Thread = tuple[object, object]
"""A pid and a tid."""


def slices_by_thread(events: Iterable[Event], categories: Sequence[str]) -> dict[Thread, list[Slice]]:
    """Return the slices of some categories by thread, those that contain others before them."""
    threads: dict[Thread, list[Slice]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            begin_us = float(event["ts"])
            slice_ = Slice(begin_us, begin_us + float(event.get("dur", 0.0)), str(event["name"]), str(event["cat"]))
            threads[event.get("pid"), event.get("tid")].append(slice_)
    for slices in threads.values():
        slices.sort(key=lambda one: (one.begin_us, -one.end_us))
    return dict(threads)


@dataclass
class OperationTotal:
    """All calls of one operation."""

    name: str
    count: int = 0
    self_us: float = 0.0
    """Without the operations that it called."""
    total_us: float = 0.0
    """With them; a call within one of the same name counts once."""


def host_totals(threads: dict[Thread, list[Slice]]) -> list[OperationTotal]:
    """Return the operations of the host, the one with the most time of its own first."""
    totals: dict[str, OperationTotal] = {}
    for slices in threads.values():
        stack: list[Slice] = []
        for one in (one for one in slices if one.category == HOST_OPERATION):
            while stack and stack[-1].end_us <= one.begin_us:
                stack.pop()
            total = totals.setdefault(one.name, OperationTotal(one.name))
            total.count += 1
            total.self_us += one.took_us
            if stack:
                inside_us = min(one.end_us, stack[-1].end_us) - one.begin_us
                totals[stack[-1].name].self_us -= inside_us
            if all(outer.name != one.name for outer in stack):
                total.total_us += one.took_us
            stack.append(one)
    return sorted(totals.values(), key=lambda total: -total.self_us)


def device_totals(threads: dict[Thread, list[Slice]]) -> list[OperationTotal]:
    """Return what ran on devices, the longest first."""
    totals: dict[str, OperationTotal] = {}
    for one in (one for slices in threads.values() for one in slices if one.category in DEVICE_CATEGORIES):
        total = totals.setdefault(one.name, OperationTotal(one.name))
        total.count += 1
        total.self_us += one.took_us
        total.total_us += one.took_us
    return sorted(totals.values(), key=lambda total: -total.self_us)


def phase_seconds(threads: dict[Thread, list[Slice]]) -> dict[str, float]:
    """Return how long each phase took, by its name."""
    phases: dict[str, float] = defaultdict(float)
    for one in (one for slices in threads.values() for one in slices if one.category == ANNOTATION):
        if one.name.startswith(PHASE_PREFIX):
            phases[one.name.removeprefix(PHASE_PREFIX)] += one.took_us / 1e6
    return dict(phases)


@dataclass
class MemoryTotal:
    """What all calls of one operation allocated themselves."""

    name: str
    count: int = 0
    allocated_bytes: int = 0


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one step."""

    operations: list[MemoryTotal]
    """Those that allocated the most first."""
    rise_bytes: int = 0
    """The most that was allocated at one time, above what was at the beginning."""
    peak_in: str = ""
    """The operation that reached it."""
    peak_phase: str = ""


def memory_use(events: Iterable[Event], on_host: bool) -> MemoryUse:
    """Return what allocated memory of the host, or of devices."""
    events = list(events)
    threads = slices_by_thread(events, (HOST_OPERATION, ANNOTATION))
    changes = [
        event
        for event in events
        if event.get("name") == _MEMORY and (int(event.get("args", {}).get("Device Type", 0)) == 0) == on_host
    ]
    changes.sort(key=lambda event: float(event["ts"]))
    places = _places(threads, changes)
    totals: dict[str, MemoryTotal] = {}
    held = rise = 0
    peak = ("", "")
    for event, (operation, phase) in zip(changes, places, strict=True):
        num_bytes = int(event["args"].get("Bytes", 0))
        held += num_bytes
        if held > rise:
            rise, peak = held, (operation, phase)
        if num_bytes > 0:
            total = totals.setdefault(operation, MemoryTotal(operation))
            total.count += 1
            total.allocated_bytes += num_bytes
    ordered = sorted(totals.values(), key=lambda total: -total.allocated_bytes)
    return MemoryUse(ordered, rise, *peak)


def _places(threads: dict[Thread, list[Slice]], events: Sequence[Event]) -> list[tuple[str, str]]:
    """Return the innermost operation and the phase at each of some events, which are in the order of their times."""
    places = []
    open_slices: dict[Thread, list[Slice]] = defaultdict(list)
    started: dict[Thread, int] = defaultdict(int)
    for event in events:
        thread, at_us = (event.get("pid"), event.get("tid")), float(event["ts"])
        slices, stack = threads.get(thread, []), open_slices[thread]
        while started[thread] < len(slices) and slices[started[thread]].begin_us <= at_us:
            stack.append(slices[started[thread]])
            started[thread] += 1
        stack[:] = [one for one in stack if one.end_us >= at_us]
        operations = [one.name for one in stack if one.category == HOST_OPERATION]
        phases = [one.name for one in stack if one.name.startswith(PHASE_PREFIX)]
        operation = operations[-1] if operations else "(outside of operations)"
        places.append((operation, phases[-1].removeprefix(PHASE_PREFIX) if phases else ""))
    return places
