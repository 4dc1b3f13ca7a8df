"""Processes that another one has started. A later process with the same pid is a different one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from instep.guard.processes import descendants_of


@dataclass(frozen=True)
class Process:
    """A process, identified by its pid and the tick at which it started."""

    pid: int
    name: str
    begun: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process of a pid; None: it has ended, or is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        name, rest = text.partition("(")[2].rpartition(")")[::2]
        fields = rest.split()
        return None if fields[0] == "Z" else cls(pid, name, int(fields[19]))

    def signal(self, number: int) -> None:
        """Send a signal, unless the pid belongs to another process now."""
        if is_alive(self):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_alive(process: Process) -> bool:
    """Return whether a process still runs."""
    now = Process.of(process.pid)
    return now is not None and now.begun == process.begun


def descendants(pid: int) -> list[Process]:
    """Return the processes that a process has started, and those that these have started."""
    return [process for child in descendants_of(pid) if (process := Process.of(child)) is not None]
