"""The phases of some steps on the accelerator's own clock.

[Note: Device times]
The host launches work and goes on; when a phase began on the accelerator only the accelerator knows. An event that is
recorded where a phase begins takes that time there. Nothing waits for it: the events of a step are read with a later
record of phases, when `query` says that the last one has passed. One step is timed for each record, about one a second.

An accelerator that is busy is behind the host; one that waits for the host is not. So the lag is taken when the host
has launched the last backward pass of the step, and not yet asked for anything that was computed. It is measured
against the moment of the step at which the accelerator was behind least (the step before ended with the host reading
the loss, at which both were at the same place). Where nothing in a step waits for the accelerator, there is no such
moment: then whether the backward pass had even begun there is a lower bound of the lag.

Ranks: each its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from instep.guard.pulse import Phase, Pulse

_MAX_MARKS = 64
"""A step with more (many micro-batches) is not timed."""


class _Mark(NamedTuple):
    phase: Phase
    host_s: float
    event: Any


class DeviceTime(NamedTuple):
    """One step on the accelerator's clock."""

    phases: dict[Phase, float]
    """Seconds."""
    lag_s: float


class DeviceTimes:
    """Times one step after each call of `begin`, if the accelerator has passed the events of the last one."""

    def __init__(self, pulse: Pulse, new_event: Callable[[], Any]) -> None:
        self._pulse, self._new_event = pulse, new_event
        self._marks: list[_Mark] | None = None
        """Of the step that is being timed; None: none is."""
        self._pending: list[_Mark] = []
        """Of a step that has ended."""
        self._late_s = self._pending_late_s = 0.0
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Time the step that follows, unless somebody else listens to the pulse or the last one is not read yet."""
        if self._pulse.listener is None and not self._pending:
            self._marks, self._late_s = [], 0.0
            self._pulse.listener = self._mark

    def end_step(self) -> None:
        """Note that a step has ended; called in every step."""
        if self._marks is None:
            return
        marks, self._marks = self._marks, None
        self._stop_listening()
        if len(marks) > 1:
            self._pending, self._pending_late_s = marks, self._late_s

    def take(self) -> DeviceTime | None:
        """Return the step that was timed last; None: there is none, or the accelerator has not passed all of it."""
        if not self._pending or not all(mark.event.query() for mark in self._pending):  # of any stream
            return None
        marks, self._pending = self._pending, []
        device_s = [marks[0].event.elapsed_time(mark.event) / 1e3 for mark in marks]
        behind_s = [at - (mark.host_s - marks[0].host_s) for at, mark in zip(device_s, marks, strict=True)]
        phases: dict[Phase, float] = {}
        for number, mark in enumerate(marks[:-1]):
            phases[mark.phase] = phases.get(mark.phase, 0.0) + device_s[number + 1] - device_s[number]
        ends = [number + 1 for number, mark in enumerate(marks[:-1]) if mark.phase is Phase.BACKWARD]
        lag_s = behind_s[ends[-1]] - min(behind_s) if ends else 0.0
        return DeviceTime(phases, max(lag_s, self._pending_late_s))

    def _stop_listening(self) -> None:
        if self._pulse.listener == self._mark:
            self._pulse.listener = None

    def _mark(self, phase: Phase) -> None:
        """Note that a phase begins, on the host and on the accelerator."""
        marks = self._marks
        if marks is None:  # who listened in between has put this back, or still calls it
            self._stop_listening()
            return
        if threading.get_ident() != self._thread:
            return
        if phase is Phase.DATA:  # what came since the last step, an evaluation perhaps, is not of this one
            marks.clear()
        if len(marks) == _MAX_MARKS:
            self._marks = None
            self._stop_listening()
            return
        if marks and marks[-1].phase is Phase.BACKWARD:
            began = marks[-1].event.query()
            self._late_s = 0.0 if began else self._pulse.since_s - marks[-1].host_s
        event = self._new_event()
        event.record()
        marks.append(_Mark(phase, self._pulse.since_s, event))
