"""The pulse: a few bytes of shared memory in which a rank notes what it is doing.

One write takes about a microsecond and never blocks. Where no launcher reads it (under torchrun, say), a rank
writes to memory of its own. The pulse also adds up how long the rank was in each phase.

Ranks: each writes its own; the launcher reads them.
"""

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

_IDENTITY = struct.Struct("<qqQ")
_BEAT = struct.Struct("<qqqd")
_SIZE = _IDENTITY.size + _BEAT.size


class Phase(IntEnum):
    """What a rank is doing."""

    STARTING = 0
    DATA = 1
    FORWARD = 2
    REDUCE = 3
    UPDATE = 4
    EVALUATE = 5
    SAVE = 6
    DONE = 7
    BACKWARD = 8
    COPY = 9
    HOOKS = 10
    OTHER = 11


# One attribute less to look up in each of the seven beats of a step.
_REDUCE, _IDENTITY_BYTES, _write_beat = int(Phase.REDUCE), _IDENTITY.size, _BEAT.pack_into


@dataclass(frozen=True)
class Beat:
    """What a pulse contains, and which process wrote it."""

    pid: int
    start_ticks: int
    """When the process started, as the kernel counts: with the pid it identifies the process."""
    main_thread: int
    made: int
    """Steps that this process has completed itself."""
    step: int
    """Steps that are completed, over all restarts."""
    phase: Phase
    time_s: float
    """When it last moved, on the monotonic clock."""


class Waited(Protocol):
    """Counts how long this rank has waited for others so far."""

    @property
    def seconds(self) -> float: ...


class _NoWaits:
    seconds = 0.0


class Pulse:
    """A rank's own pulse."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._made = self._step = 0
        self.is_used = False
        """Whether a run has counted its time since the pulse began."""
        self.phase = Phase.STARTING
        self.begun_s = self.since_s = time.monotonic()
        """When the pulse, and the phase that is under way, began, on the monotonic clock."""
        self.seconds = [0.0] * len(Phase)
        """How long the rank was in each phase, up to `since_s`; waiting for other ranks counts as REDUCE."""
        self._waits: Waited = _NoWaits()
        self._waited_s = 0.0
        self.listener: Callable[[Phase], None] | None = None
        """Called with each phase that begins."""

    def beat(self, phase: Phase) -> None:
        """Write what this rank is doing now."""
        now, waited_s = time.monotonic(), self._waits.seconds
        _write_beat(self._memory, _IDENTITY_BYTES, self._made, self._step, phase, now)
        took_s = now - self.since_s
        if waited_s != self._waited_s:
            took_s -= waited_s - self._waited_s
            self.seconds[_REDUCE] += waited_s - self._waited_s
            self._waited_s = waited_s
        self.seconds[self.phase] += took_s
        self.phase, self.since_s = phase, now
        if self.listener is not None:
            self.listener(phase)

    def watch_waits(self, waits: Waited) -> None:
        """Read there from now on how long the rank has waited for others so far, whatever its phase."""
        self._waits, self._waited_s = waits, waits.seconds

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase while a block lasts, then in the one before."""
        before = self.phase
        self.beat(phase)
        try:
            yield
        finally:
            self.beat(before)

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Count seconds of one phase as another's: who measured them could not call `beat`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def begin_steps(self, step: int) -> None:
        """Write that steps begin, after `step` completed ones."""
        self._step = step
        self.beat(Phase.DATA)

    def end_step(self, step: int | None = None) -> None:
        """Write that a step is completed, and what follows it begins; without `step`, count it."""
        self._made += 1
        self._step = self._step + 1 if step is None else step
        self.beat(Phase.HOOKS)


_here = Pulse(bytearray(_SIZE))
_here.is_used = True  # nobody says when this process's work began: it may have been at a prompt for hours


def here() -> Pulse:
    """Return this process's pulse."""
    return _here


def begin_pulse(path: Path) -> None:
    """Write this process's pulse to a file from now on; called once, in a rank's worker."""
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
    """Return what a rank's pulse contains; None: there is none."""
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
    """Return when a process started, as the kernel counts; None: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None
