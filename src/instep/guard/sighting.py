"""What was seen of a rank: values only. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from instep.guard.pulse import Phase


@dataclass(frozen=True)
class Frame:
    """A call on a stack."""

    file: str
    line: int
    function: str
    users: bool = False
    """Whether the person wrote it, and not a library."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """Where a process is."""

    pid: int = 0
    state: str = "S"
    """The kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped, t is held by a debugger."""
    stack: tuple[Frame, ...] = ()
    """The main thread's, the innermost call first; empty: it did not answer."""
    system_call: str = ""
    """The one it is blocked in, if known."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Where a rank is."""

    rank: int
    process: Process | None
    """None: it has ended."""
    step: int = 0
    """Steps it has done."""
    phase: Phase = Phase.STARTING
    quiet_s: float = 0.0
    """How long ago it last moved."""
    helpers: tuple[Process, ...] = ()
    """Its data workers, and other processes that it forked."""
    cpu_s: float = 0.0
    """What it and its children have computed."""
    io_bytes: int = 0
    """What it and its children have read and written."""
