"""Processes that others have started, told apart from those that merely got the same number later."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from instep.guard.processes import descendants_of


@dataclass(frozen=True)
class Process:
    """A process, by its number and the tick at which it began."""

    pid: int
    name: str
    begun: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Find a process; None: it is gone, or has ended and is only not fetched yet."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        name, rest = text.partition("(")[2].rpartition(")")[::2]
        fields = rest.split()
        return None if fields[0] == "Z" else cls(pid, name, int(fields[19]))

    def signal(self, number: int) -> None:
        """Send a signal, if it is still this process."""
        if is_alive(self):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_alive(process: Process) -> bool:
    """Tell whether a process still runs."""
    now = Process.of(process.pid)
    return now is not None and now.begun == process.begun


def descendants(pid: int) -> list[Process]:
    """Find the processes that a process has started, and those that these have."""
    return [found for child in descendants_of(pid) if (found := Process.of(child)) is not None]
