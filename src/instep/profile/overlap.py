"""How much of the communication was hidden behind computation. Pure: from the events of a trace.

On a device, kernels of its communication library are compared with all others. On the host, operations and ranges that
communicate are compared with the operations of the threads that compute: a thread that waits in a collective computes
nothing, so what is hidden runs on another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from instep.profile.intervals import Interval, difference, intersection, length, union
from instep.profile.operations import (
    ANNOTATION,
    DEVICE_CATEGORIES,
    HOST_OPERATION,
    Slice,
    slices_by_thread,
)
from instep.profile.trace import PHASE_PREFIX, Event

COMMUNICATION = f"{PHASE_PREFIX}communication"
COLLECTIVE = f"{PHASE_PREFIX}collective"
"""A collective of ours that runs on a thread of its own."""
_BACKWARD = "autograd::engine::"
_STEPPING = "Optimizer.step#"


@dataclass(frozen=True)
class Overlap:
    """Times in seconds."""

    where: str
    """`device`, or `host`."""
    communication_s: float
    hidden_s: float
    """Of these, while this rank computed."""
    compute_s: float

    @property
    def exposed_s(self) -> float:
        """The communication that nothing hid."""
        return self.communication_s - self.hidden_s

    @property
    def share(self) -> float | None:
        """The hidden share of the communication; None: there was none."""
        return self.hidden_s / self.communication_s if self.communication_s else None


def measure_overlap(events: Iterable[Event], backends: Sequence[str]) -> Overlap:
    """Return the overlap on the devices of a trace, or on the host if it has none.

    `backends` are the names of the devices' communication libraries, which their kernels contain.
    """
    events = list(events)
    kernels = slices_by_thread(events, DEVICE_CATEGORIES)
    if kernels:
        every = [one for slices in kernels.values() for one in slices]
        talks = [any(name in one.name.lower() for name in backends) for one in every]
        communication = union(_span(one) for one, is_talk in zip(every, talks, strict=True) if is_talk)
        compute = union(_span(one) for one, is_talk in zip(every, talks, strict=True) if not is_talk)
        return _compare("device", communication, compute)
    threads = slices_by_thread(events, (HOST_OPERATION, ANNOTATION))
    of_thread = {
        thread: union(_span(one) for one in slices if communicates(one, backends)) for thread, slices in threads.items()
    }
    computing = {thread: slices for thread, slices in threads.items() if _computes(slices)} or threads
    compute = union(
        span
        for thread, slices in computing.items()
        for span in difference(union(_span(one) for one in slices if one.category == HOST_OPERATION), of_thread[thread])
    )
    return _compare("host", union(span for spans in of_thread.values() for span in spans), compute)


def _compare(where: str, communication: list[Interval], compute: list[Interval]) -> Overlap:
    hidden_us = length(intersection(communication, compute))
    return Overlap(where, length(communication) / 1e6, hidden_us / 1e6, length(compute) / 1e6)


def communicates(one: Slice, backends: Sequence[str]) -> bool:
    """Return whether a slice of the host is communication."""
    prefixes = ("c10d::", "gloo:", *(f"{name}:" for name in backends))
    return one.name in (COMMUNICATION, COLLECTIVE) or one.name.startswith(prefixes)


def _computes(slices: Iterable[Slice]) -> bool:
    """Return whether a thread makes the steps or a backward pass: not one that reads data or communicates."""
    return any(
        one.name.startswith((_BACKWARD, _STEPPING)) or (one.name.startswith(PHASE_PREFIX) and one.name != COLLECTIVE)
        for one in slices
    )


def _span(one: Slice) -> Interval:
    return (one.begin_us, one.end_us)
