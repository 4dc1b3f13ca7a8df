"""Every error that instep raises on purpose.

    InstepError
    ├── SpecError         the command line, a TrainSpec field or a Task's value is wrong        exit 2
    ├── TaskError         the Task breaks its contract (loss returns a vector, no length)       exit 2
    ├── DataError         a dataset cannot be read, or holds nothing                            exit 2
    ├── CheckpointError   a run directory or checkpoint cannot be written or continued          exit 2
    ├── NumericsError     the loss is not a number                                              exit 1
    ├── CompileError      --compile was asked for, and the model cannot be compiled             exit 1
    ├── DivergenceError   ranks that must hold the same weights do not; what they saved is set aside    exit 3
    ├── EnvironmentFailed the machine, the network or the launcher is not as it must be         exit 3
    │   └── PeerLost      another rank ended, left or did not come; names it                    exit 3
    └── RanksFailed       ranks of a launched job failed; carries them, the first one first

A message says what was found, why it cannot be, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

EXIT_DONE, EXIT_USER, EXIT_SPEC, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class InstepError(Exception):
    """The root: `except InstepError` catches everything that instep raises on purpose."""

    exit_code: ClassVar[int] = EXIT_USER


class SpecError(InstepError):
    """What was asked for cannot be done."""

    exit_code = EXIT_SPEC


class TaskError(InstepError):
    """The Task does not keep its side of the contract."""

    exit_code = EXIT_SPEC


class DataError(InstepError):
    """A dataset cannot be read or holds nothing."""

    exit_code = EXIT_SPEC


class CheckpointError(InstepError):
    """A run directory or a checkpoint cannot be written, read or continued."""

    exit_code = EXIT_SPEC


class NumericsError(InstepError):
    """The loss is not a finite number."""


class CompileError(InstepError):
    """What should be compiled cannot be."""


class DivergenceError(InstepError):
    """Ranks that must hold the same do not. Another try goes on from where they last did."""

    exit_code = EXIT_ENVIRONMENT


class EnvironmentFailed(InstepError):
    """The machine, the network or the launcher is not as it must be."""

    exit_code = EXIT_ENVIRONMENT


class PeerLost(EnvironmentFailed):
    """A collective cannot be completed, because another rank is not there for it."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        """Whom this rank waited for in vain."""
        super().__init__(message)


class Preempted(SystemExit):
    """The run was asked to stop, has saved, and goes on when the same command is run again. Not an error: exit 0."""

    def __init__(self) -> None:
        super().__init__(EXIT_DONE)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How one rank ended, when it did not end well."""

    rank: int
    time_ns: int
    summary: str
    """One line: the exception's type and message, or the signal's name."""
    traceback: str = ""
    """Empty where the process had no chance to write one, or where the message says it all."""
    exit_code: int = EXIT_USER
    """What the whole command exits with if this is the first failure."""
    consequence: bool = False
    """Whether it merely noticed that another rank was gone (a closed connection, say)."""
    final: bool = False
    """Whether another try could only end the same way: a wrong spec, a loss that is not a number."""
    log: str = ""
    names_ranks: bool = False
    """Whether the summary is a sentence that names its ranks itself."""
    host: str = ""
    """The machine that it was on, where there are several."""
    step: int | None = None
    """How many steps were done then, where that is known."""
    doubt_ns: int = 0
    """How far its time may be off another machine's."""

    @property
    def who(self) -> str:
        """The rank, and where it was."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")

    @property
    def line(self) -> str:
        """The summary with its rank."""
        return self.summary if self.names_ranks else f"{self.who}: {self.summary}"


class RanksFailed(InstepError):
    """Ranks of a launched job failed."""

    def __init__(self, failures: Sequence[FailureRecord]) -> None:
        assert failures
        self.failures = tuple(failures)
        super().__init__(self.first.line)

    @property
    def first(self) -> FailureRecord:
        """The failure that caused the others."""
        return self.failures[0]
