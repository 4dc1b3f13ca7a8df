"""Every error that instep raises on purpose.

    InstepError
    ├── SpecError         the command line, a TrainSpec field or a Task's value is wrong        exit 2
    ├── TaskError         the Task breaks its contract (loss returns a vector, no length)       exit 2
    ├── DataError         a dataset cannot be read or holds nothing; predictions not written    exit 2
    │   └── BadSample     a block or a sample of a file is corrupt; names it                    exit 2
    ├── CheckpointError   a run directory or checkpoint cannot be written or continued          exit 2
    ├── NumericsError     the loss is not a number                                              exit 1
    ├── CompileError      the model cannot be compiled, although --compile was given            exit 1
    ├── CollectiveMismatch the ranks called different collectives; names both                   exit 1
    ├── DivergenceError   the ranks' weights differ; checkpoints since then are set aside        exit 3
    ├── EnvironmentFailed the machine, the network or the launcher failed                       exit 3
    │   └── PeerLost      another rank ended, left or never joined; names it                    exit 3
    └── RanksFailed       ranks of a launched job failed; has their failures, the first cause first

A message says what is wrong (with values), why it cannot work, and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

EXIT_DONE, EXIT_USER, EXIT_SPEC, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class InstepError(Exception):
    """The base class: `except InstepError` catches everything that instep raises on purpose."""

    exit_code: ClassVar[int] = EXIT_USER


class SpecError(InstepError):
    """An option or a value is wrong."""

    exit_code = EXIT_SPEC


class TaskError(InstepError):
    """The Task breaks its contract."""

    exit_code = EXIT_SPEC


class DataError(InstepError):
    """A dataset cannot be read, or is empty; or predictions cannot be written."""

    exit_code = EXIT_SPEC


class BadSample(DataError):
    """A block or a sample is corrupt, and would be at every reading."""

    def __init__(self, message: str, source: str = "") -> None:
        self.source = source
        """The file that it lies in."""
        super().__init__(message, source)

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(InstepError):
    """A run directory or a checkpoint cannot be written, read or continued."""

    exit_code = EXIT_SPEC


class NumericsError(InstepError):
    """The loss is not a finite number."""


class CompileError(InstepError):
    """The model cannot be compiled."""


class CollectiveMismatch(InstepError):
    """Ranks that should have called the same collective called different ones."""

    def __init__(self, message: str, called: str) -> None:
        self.called = called
        """What this rank called."""
        super().__init__(message)


class UnfitCheckpoint(CheckpointError):
    """A checkpoint whose files are as they were written, and whose content cannot be restored."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        """Of the checkpoint."""
        super().__init__(message)


class DivergenceError(InstepError):
    """The ranks' weights differ. A restart resumes from the last checkpoint at which they agreed."""

    exit_code = EXIT_ENVIRONMENT


class EnvironmentFailed(InstepError):
    """The machine, the network or the launcher failed."""

    exit_code = EXIT_ENVIRONMENT


class PeerLost(EnvironmentFailed):
    """A collective cannot complete because another rank is gone."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        """The ranks that this rank waited for."""
        super().__init__(message)


class Preempted(SystemExit):
    """The run was asked to stop and has saved; the same command continues it. No error: exit 0; after Ctrl-C 130."""

    def __init__(self, interrupted: bool) -> None:
        super().__init__(EXIT_INTERRUPTED if interrupted else EXIT_DONE)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training. The message says how to continue it."""

    saved = False
    """Whether it was saved first, and its result shown."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How one rank failed."""

    rank: int
    time_ns: int
    summary: str
    """One line: the exception's type and message, or the signal's name."""
    traceback: str = ""
    """Empty where the process could not write one, or where the message is enough."""
    exit_code: int = EXIT_USER
    """The exit code of the command if this is the first failure."""
    consequence: bool = False
    """Whether the rank failed only because another one was gone (a closed connection, for instance)."""
    final: bool = False
    """Whether a restart would fail in the same way: a wrong spec, a loss that is not a number."""
    log: str = ""
    names_ranks: bool = False
    """Whether the summary is a sentence that names the ranks."""
    host: str = ""
    """The rank's node, where there are several."""
    step: int | None = None
    """The number of completed steps, where it is known."""
    collective: str = ""
    """The collective that the rank called while another one called a different one."""
    doubt_ns: int = 0
    """The uncertainty of its time, compared with another node's."""
    out_of_memory: bool = False
    """Whether memory ran out, as far as an exception says so: a kill by the system looks like any other."""

    @property
    def who(self) -> str:
        """The rank and its node."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")

    @property
    def line(self) -> str:
        """The summary with the rank."""
        return self.summary if self.names_ranks else f"{self.who}: {self.summary}"


class RanksFailed(InstepError):
    """Ranks of a launched job failed."""

    def __init__(self, failures: Sequence[FailureRecord], report: str = "") -> None:
        """`report` is the message; by default the line of the first failure."""
        assert failures
        self.failures = tuple(failures)
        super().__init__(report or self.first.line)

    @property
    def first(self) -> FailureRecord:
        """The failure that caused the others."""
        return self.failures[0]
