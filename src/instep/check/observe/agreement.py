"""How the ranks agree on the step after which all of them leave, without a collective.

[Note: Leaving together]
A rank that left a script alone would leave the others in a collective for ever. Each rank therefore publishes its step
in memory that all ranks of this node share, and whoever sees enough names the step at which all leave: one that no
other rank has reached. All of this happens under one lock, so that every rank finds that step named when it gets
there. A rank that is there waits for the others; what it owes them is sent by then. Where ranks make different numbers
of steps, one may never get there: when nothing has moved for a while, the waiting ranks release all, and each leaves
wherever it is.

Ranks: all, of one node. Issues no collectives.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from instep.check.plan import Progress, WatchPlan

_HEAD = struct.Struct("<qq")
_ROW = struct.Struct("<qqqq")


class RankState(IntEnum):
    """Where a rank is."""

    RUNNING = 0
    WAITING = 1
    """At the step at which all leave."""
    ENDED = 2


def create_agreement(path: Path, world_size: int) -> None:
    """Write the file that the ranks share."""
    path.write_bytes(bytes(_HEAD.size + world_size * _ROW.size))


class Agreement:
    """What the ranks of one node know of each other's progress."""

    def __init__(self, path: Path, rank: int, plan: WatchPlan) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        self._rank, self._plan = rank, plan
        self._threads = threading.Lock()  # the lock on the file is between processes
        self._world_size = (len(self._memory) - _HEAD.size) // _ROW.size

    def advance(self, step: int, epochs: int, evaluated: bool, seconds: float = 0.0) -> bool:
        """Publish a step that this rank has made; return whether it is the one after which all leave."""
        with self._locked():
            self._write_row(step, epochs, evaluated)
            stop_at, released = self._head()
            if not stop_at and self._plan.is_enough(self._progress(seconds)):
                stop_at = max(step, 1 + max((rows[0] for rows in self._others()), default=0))
                self._write_head(stop_at, released)
            return bool(stop_at) and step >= stop_at

    def ask(self) -> None:
        """Name the next step as the last one, if none is named."""
        with self._locked():
            stop_at, released = self._head()
            if not stop_at:
                self._write_head(1 + self._progress().step, released)

    def set_state(self, state: RankState) -> None:
        """Publish where this rank is."""
        with self._locked():
            step, epochs, evaluated, _ = self._row(self._rank)
            self._write_row(step, epochs, bool(evaluated), state)

    def release(self) -> None:
        """Allow all ranks to leave wherever they are."""
        with self._locked():
            self._write_head(self._head()[0], 1)

    @property
    def is_released(self) -> bool:
        """Whether all ranks may leave wherever they are."""
        return bool(self._head()[1])

    @property
    def all_there(self) -> bool:
        """Whether every other rank waits, too, or has ended."""
        return all(row[3] != RankState.RUNNING for row in self._others())

    def steps(self) -> tuple[int, ...]:
        """Return the steps that each rank has made."""
        return tuple(self._row(rank)[0] for rank in range(self._world_size))

    def _progress(self, seconds: float = 0.0) -> Progress:
        rows = [self._row(rank) for rank in range(self._world_size)]
        steps, epochs, evaluated, _ = zip(*rows, strict=True)
        return Progress(max(steps), max(epochs), any(evaluated), seconds)

    def _others(self) -> list[tuple[int, int, int, int]]:
        return [self._row(rank) for rank in range(self._world_size) if rank != self._rank]

    def _row(self, rank: int) -> tuple[int, int, int, int]:
        return _ROW.unpack_from(self._memory, _HEAD.size + rank * _ROW.size)

    def _write_row(self, step: int, epochs: int, evaluated: bool, state: RankState = RankState.RUNNING) -> None:
        _ROW.pack_into(self._memory, _HEAD.size + self._rank * _ROW.size, step, epochs, evaluated, state)

    def _head(self) -> tuple[int, int]:
        return _HEAD.unpack_from(self._memory)

    def _write_head(self, stop_at: int, released: int) -> None:
        _HEAD.pack_into(self._memory, 0, stop_at, released)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
