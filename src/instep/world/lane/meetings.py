"""Come to a meeting, and see who else has come; in C where that was compiled, else in Python.

`come` tells every other rank that this one is there. `take` takes their posts, from the rank at place `first` on, and
gives the place of one that has not come after a short look, `ALL` if everyone has. Data that was written before
`come` is seen after `take` ([Note: Hand-over]).
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Protocol

from instep.world.lane.engine import Engine, LaneView
from instep.world.lane.semaphores import CELL_BYTES, post, try_wait

ALL = -1
NEVER_NS = 2**62
"""A deadline that leaves it to the meeting how long to look; else by time.monotonic_ns()."""


class Meetings(Protocol):
    """One rank's side of the meetings."""

    def come(self) -> None:
        """Tell the others that this rank is there."""

    def take(self, first: int, deadline_ns: int) -> int:
        """Take what the others have posted."""


def incoming(view: LaneView) -> dict[int, int]:
    """Give where each other rank posts for this one, by its place."""
    cell = {other: view.cells + (other * view.size + view.place) * CELL_BYTES for other in range(view.size)}
    return {other: address for other, address in cell.items() if other != view.place}


class CompiledMeetings:
    """Meetings by the engine."""

    def __init__(self, engine: Engine, view: LaneView) -> None:
        self._engine, self._view = engine, ctypes.pointer(view)

    def come(self) -> None:
        self._engine.come(self._view)

    def take(self, first: int, deadline_ns: int) -> int:
        found: int = self._engine.take(self._view, first, deadline_ns)
        return found


class PlainMeetings:
    """Meetings by the C library's semaphores, looked at from Python."""

    def __init__(self, view: LaneView) -> None:
        self._spin_ns = view.spin_ns
        self._incoming = incoming(view)
        self._outgoing = [view.cells + (view.place * view.size + other) * CELL_BYTES for other in self._incoming]

    def come(self) -> None:
        for address in self._outgoing:
            post(address)

    def take(self, first: int, deadline_ns: int) -> int:
        for place, address in self._incoming.items():
            if place >= first and try_wait(address):
                limit = min(time.monotonic_ns() + self._spin_ns, deadline_ns)
                while try_wait(address):
                    if time.monotonic_ns() >= limit:
                        return place
                    os.sched_yield()  # with more ranks than cores, the one waited for may need this core
        return ALL
