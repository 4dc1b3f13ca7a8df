"""The other processes on a lane: whether they live, and how to speak of them."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for the disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


class Peers:
    """Processes by their place on the lane; each is held by a file descriptor, so no other can take its number."""

    def __init__(self, ranks: Sequence[int], pids: Sequence[int], own: int) -> None:
        self._ranks, self._pids = ranks, pids
        self._poll = select.poll()
        self._fds: dict[int, int] = {}
        self._gone: set[int] = set()
        for place, pid in enumerate(pids):
            if place != own:
                self._hold(place, pid)

    def _hold(self, place: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(place)
            return
        self._fds[fd] = place
        self._poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        """Give the places whose processes have ended, reaped or not."""
        return sorted(self._gone | {self._fds[fd] for fd, _ in self._poll.poll(0)})

    def name(self, place: int) -> str:
        """Say who is at a place: `rank 1 (pid 4711)`."""
        return f"rank {self._ranks[place]} (pid {self._pids[place]})"

    def rank(self, place: int) -> int:
        """Give the rank at a place."""
        return self._ranks[place]

    def is_stopped(self, place: int) -> bool:
        """Tell whether a signal or a debugger holds a process."""
        return self.state(place).startswith("stopped")

    def state(self, place: int) -> str:
        """Say what a process is doing, as far as the system tells."""
        try:
            text = Path(f"/proc/{self._pids[place]}/stat").read_text()
        except OSError:
            return "gone"
        letter = text.rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")

    def close(self) -> None:
        """Let the processes go."""
        for fd in self._fds:
            self._poll.unregister(fd)
            os.close(fd)
        self._fds.clear()
