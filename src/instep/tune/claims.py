"""Which process runs which trial, where several processes share one search.

[Note: A shared search]
With a journal as its storage, a search may have several processes, on one machine or on several that see its folder.
No process leads. Each of them, whenever it is free:

- locks the folder's decisions, so that one process at a time decides, and takes in what the others have recorded;
- continues a trial that nobody runs, if there is one: a trial whose claim is free and which, as is looked up again when
  this process has the claim, has not ended;
- or else draws the parameters of a new trial, over the trials of all processes, records it, and claims it.

Both are locks of files, which the kernel releases when a process ends in whichever way. So a trial of a process that
was killed is continued at once by the next process that is free, and no trial runs twice. Nothing has to expire, and no
clocks are compared. On a network file system such locks have to hold between nodes, as those of run directories do.
"""

from __future__ import annotations

import contextlib
import fcntl
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FOLDER = ".claims"


class Claims(ABC):
    """What this process has claimed."""

    is_shared: bool
    """Whether other processes may search in the same folder."""

    @abstractmethod
    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which no other process decides."""

    @abstractmethod
    def take(self, number: int) -> bool:
        """Claim a trial; return whether this process has it now."""

    @abstractmethod
    def release(self, number: int) -> None:
        """Release a claim."""


class SoleClaims(Claims):
    """Claims of a process that has the folder for itself."""

    is_shared = False

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that does nothing."""
        return contextlib.nullcontext()

    def take(self, number: int) -> bool:  # noqa: ARG002 - nobody else is here
        """Return True."""
        return True

    def release(self, number: int) -> None:
        """Do nothing."""


class SharedClaims(Claims):
    """Claims as locks of files in the search's folder. See [Note: A shared search]."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """`path` is the folder of the search."""
        self._folder = path / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._files: dict[int, IO[bytes]] = {}

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Yield when no other process decides; it may take as long as one draws parameters."""
        with (self._folder / "decisions").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def take(self, number: int) -> bool:
        """Lock the file of a trial, unless another process has."""
        if number in self._files:
            return True
        file = (self._folder / f"{number:04d}").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._files[number] = file
        return True

    def release(self, number: int) -> None:
        """Unlock the file of a trial, if this process has locked it."""
        if (file := self._files.pop(number, None)) is not None:
            file.close()
