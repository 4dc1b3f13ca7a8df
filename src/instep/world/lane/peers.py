"""The other ranks of a lane: wait for them, notice that one is lost, and name it.

After a failure no barrier is possible: every later call on the lane raises, and issues nothing.
"""

import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from instep.core.errors import PeerLost
from instep.world.lane.barrier import has_post, try_wait, wait
from instep.world.lane.block import Block

_POLL_S = 0.02
_STATES = {
    "running": "running",
    "sleeping": "waiting",
    "disk-sleep": "waiting for the disk",
    "stopped": "stopped by a signal",
    "tracing-stop": "stopped by a debugger",
    "zombie": "ended",
}


class Peers:
    """The lane's ranks by local rank. Each process is held by a pidfd, so its pid cannot be reused unnoticed."""

    def __init__(
        self,
        block: Block,
        own: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        incoming: Mapping[int, int],
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self.broken = ""
        """Why no collective is possible any more; empty: it is."""
        self._own, self._ranks, self._pids, self._incoming = own, ranks, pids, incoming
        # Two bytes a rank, behind the block's token: whether it has left, and whether it has given up. Then two more
        # each: the local rank that it waited for when it gave up.
        size = len(ranks)
        marks = block.bytes[64 : 64 + 4 * size]
        self._left, self._gave_up = marks[:size], marks[size : 2 * size]
        self._blamed = marks[2 * size :].view(torch.int16)
        self._poll = select.poll()
        self._fds: dict[int, int] = {}
        self._gone: set[int] = set()
        for local_rank in incoming:
            try:
                fd = os.pidfd_open(pids[local_rank])
            except ProcessLookupError:
                self._gone.add(local_rank)
            else:
                self._fds[fd] = local_rank
                self._poll.register(fd, select.POLLIN)

    def check(self) -> None:
        """Raise PeerLost if no collective is possible any more."""
        if self.broken:
            raise PeerLost(f"This group is broken: {self.broken}", [])

    def break_off(self, reason: str) -> None:
        """Make every later collective raise; the first reason counts."""
        self.broken = self.broken or reason

    def leave(self) -> None:
        """Mark this rank as gone, for ranks that still wait for it."""
        self._left[self._own] = 1
        self.break_off("it was closed.")
        for fd in self._fds:
            self._poll.unregister(fd)
            os.close(fd)
        self._fds.clear()

    def wait_for(self, local_rank: int, what: str) -> None:
        """Sleep until a rank has arrived; raise PeerLost if one that is awaited cannot, or did not in time."""
        deadline = time.monotonic() + self.timeout_s
        address = self._incoming[local_rank]
        while not wait(address, _POLL_S):
            self.check()
            lost = self._lost(local_rank)
            if lost is None and time.monotonic() < deadline:
                continue
            if lost in (None, local_rank) and not try_wait(address):  # it arrived just before it ended
                return
            if lost is None:  # of several, one that is stopped rather than one that waits for it as well
                missing = self._missing(local_rank)
                lost = next((other for other in missing if self._state(other).startswith("stopped")), local_rank)
            self._give_up(lost, what)

    def _missing(self, first: int) -> list[int]:
        """Return the local ranks from `first` on that have not arrived; those before have."""
        return [other for other, address in self._incoming.items() if other >= first and not has_post(address)]

    def _lost(self, first: int) -> int | None:
        """Return the rank to blame if not all can arrive any more.

        The marks are hints for a message, read and written without order: they carry no data. A rank that has
        ended or left after it arrived is no loss.
        """
        # Before the marks of those that gave up: a rank gives up first and leaves then, and is not the one to blame.
        gone = {*self._ended(), *(other for other, mark in enumerate(self._left.tolist()) if mark)}
        gave_up = [other for other, mark in enumerate(self._gave_up.tolist()) if mark and other != self._own]
        blamed = [int(self._blamed[other]) for other in gave_up]
        if blamed:  # a rank that gave up because of this one is lost; otherwise the rank that it blames
            return next((other for other in blamed if other != self._own), gave_up[0])
        return next((other for other in self._missing(first) if other in gone), None)

    def _give_up(self, local_rank: int, what: str) -> NoReturn:
        if local_rank in self._ended():
            cause = f"{self._name(local_rank)} has ended"
        elif self._left[local_rank]:
            cause = f"{self._name(local_rank)} has left the group"
        elif self._gave_up[local_rank] and int(self._blamed[local_rank]) == self._own:
            cause = f"{self._name(local_rank)} has given up waiting for this rank"
        else:
            state = self._state(local_rank)
            cause = f"{self._name(local_rank)} did not arrive within {self.timeout_s:g} s; it is {state}"
        self._blamed[self._own] = local_rank
        self._gave_up[self._own] = 1
        self.broken = f"{cause}."
        raise PeerLost(f"{cause}, while {self._name(self._own)} waited in {what}.", [self._ranks[local_rank]])

    def _ended(self) -> list[int]:
        """Return the local ranks whose processes have ended, reaped or not."""
        return sorted(self._gone | {self._fds[fd] for fd, _ in self._poll.poll(0)})

    def _name(self, local_rank: int) -> str:
        return f"rank {self._ranks[local_rank]} (pid {self._pids[local_rank]})"

    def _state(self, local_rank: int) -> str:
        """Return what a process is doing, in words."""
        import psutil  # 15 ms, and only needed for a message

        try:
            status = psutil.Process(self._pids[local_rank]).status()
        except psutil.Error:
            return "gone"
        return _STATES.get(status, str(status))
