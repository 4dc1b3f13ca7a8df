"""Ranges by phase: what marks the phases of a step in a trace, or for a profiler outside.

Ranks: those that are profiled; all of them with `--nvtx`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from instep.profile.trace import PHASE_PREFIX


class Pulse(Protocol):
    """What tells that a phase begins (guard/pulse.py)."""

    listener: Callable[[Any], None] | None
    phase: Any


class PhaseRanges:
    """Opens a range for each phase that begins, and closes the one before, for as long as it is entered."""

    def __init__(
        self, pulse: Pulse, name_of: Callable[[IntEnum], str], push: Callable[[str], None], pop: Callable[[], None]
    ) -> None:
        self._pulse, self._name_of, self._push, self._pop = pulse, name_of, push, pop
        self._thread = threading.get_ident()
        self._is_open = False
        self._before: Callable[[Any], None] | None = None

    def __enter__(self) -> PhaseRanges:
        """Begin with the phase that is under way."""
        self._before, self._pulse.listener = self._pulse.listener, self._begin
        self._open(self._pulse.phase)
        return self

    def __exit__(self, *_: object) -> None:
        self._pulse.listener = self._before
        self._close()

    def _begin(self, phase: IntEnum) -> None:
        if self._before is not None:
            self._before(phase)
        if threading.get_ident() == self._thread:  # a range ends on the thread on which it began
            self._close()
            self._open(phase)

    def _open(self, phase: IntEnum) -> None:
        self._push(PHASE_PREFIX + self._name_of(phase))
        self._is_open = True

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pop()
