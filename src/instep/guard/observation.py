"""What was observed of a rank, as values. Pure."""

from dataclasses import dataclass

from instep.guard.pulse import Phase


@dataclass(frozen=True)
class Frame:
    """A call on a stack."""

    file: str
    line: int
    function: str
    users: bool = False
    """Whether the user wrote it, and not a library."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """Where a process is."""

    pid: int = 0
    state: str = "S"
    """The kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped, t is stopped by a debugger."""
    stack: tuple[Frame, ...] = ()
    """The main thread's, the innermost call first; empty: it did not answer."""
    system_call: str = ""
    """The one it is blocked in, if known."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Where a rank is."""

    rank: int
    process: Process | None
    """None: it has ended."""
    step: int = 0
    """Steps it has completed; -1: unknown."""
    phase: Phase = Phase.STARTING
    quiet_s: float = 0.0
    """How long ago it last moved."""
    helpers: tuple[Process, ...] = ()
    """Its data workers, and other processes that it forked."""
    cpu_s: float = 0.0
    """CPU time of the rank and its children."""
    io_bytes: int = 0
    """Bytes that the rank and its children have read and written."""
