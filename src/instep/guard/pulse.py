"""The pulse: a few bytes of shared memory in which a rank says where it is, for whoever watches.

Room: no torch. One write takes well under a microsecond and waits for nobody. A rank that nobody watches (one that
torchrun started, say) has a pulse that goes nowhere.

Ranks: all write, each its own; the launching process reads.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_IDENTITY = struct.Struct("<qqQ")
_BEAT = struct.Struct("<qqqd")
_SIZE = _IDENTITY.size + _BEAT.size


class Phase(IntEnum):
    """What a rank is at."""

    STARTING = 0
    DATA = 1
    COMPUTE = 2
    REDUCE = 3
    UPDATE = 4
    EVALUATE = 5
    SAVE = 6
    DONE = 7


@dataclass(frozen=True)
class Beat:
    """What a pulse says, and whose it is."""

    pid: int
    start_ticks: int
    """When the process began, as the kernel counts: with the pid, no other process can be meant."""
    main_thread: int
    made: int
    """Steps that this process has made itself."""
    step: int
    """Steps that are done, over all restarts."""
    phase: Phase
    time_s: float
    """When it last moved, on the monotonic clock."""


class Pulse:
    """A rank's own pulse."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._made = self._step = 0

    def beat(self, phase: int) -> None:
        """Say what this rank is at now."""
        _BEAT.pack_into(self._memory, _IDENTITY.size, self._made, self._step, phase, time.monotonic())

    def begin_steps(self, step: int) -> None:
        """Say that steps begin, after `step` that were done before."""
        self._step = step
        self.beat(Phase.DATA)

    def end_step(self, step: int | None = None) -> None:
        """Say that a step was made; unless it is given, its number is counted. The next one's data follow."""
        self._made += 1
        self._step = self._step + 1 if step is None else step
        self.beat(Phase.DATA)


_here = Pulse(bytearray(_SIZE))


def here() -> Pulse:
    """Give this process's pulse."""
    return _here


def begin_pulse(path: Path) -> None:
    """Make this process one that is watched; called once, in a rank's worker."""
    global _here
    data = bytearray(_SIZE)
    _IDENTITY.pack_into(data, 0, os.getpid(), start_ticks_of(os.getpid()) or 0, threading.main_thread().ident or 0)
    _BEAT.pack_into(data, _IDENTITY.size, 0, 0, Phase.STARTING, time.monotonic())
    part = path.with_name(f".{path.name}")
    part.write_bytes(data)
    with part.open("r+b") as file:
        _here = Pulse(mmap.mmap(file.fileno(), _SIZE))
    part.rename(path)


def read_pulse(path: Path) -> Beat | None:
    """Read a rank's pulse; None if there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE:
        return None
    made, step, phase, time_s = _BEAT.unpack_from(data, _IDENTITY.size)
    pid, start_ticks, main_thread = _IDENTITY.unpack_from(data)
    return Beat(pid, start_ticks, main_thread, made, step, Phase(phase), time_s)


def start_ticks_of(pid: int) -> int | None:
    """Tell when a process began, as the kernel counts; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None
