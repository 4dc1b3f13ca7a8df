"""A connection to the board that never keeps its caller waiting, and a way to end connections that would.

torch's store waits without end for an answer once its request is out: over a cut cable that is a quarter of an hour.
So each call runs in a thread of its own, which is left behind when it takes too long, with its connection.

Room: the network. Ranks: none; these are the processes that launch them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch.distributed as dist

from instep.core.errors import EnvironmentFailed
from instep.launch.machines.board import Board

T = TypeVar("T")

_PATIENCE_S = 1.0
_FIRST_PATIENCE_S = 3.0
"""A new connection takes a few round trips."""
_AGAIN_S = 0.1


class Silent(Exception):
    """The board did not answer in time."""


class HostGone(Exception):
    """The machine of the board is there, but the process that hosted it has ended: nothing listens, or another one."""


class Line:
    """Calls the board, on a new connection whenever the old one is of no use."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._open: Board | None = None
        self._address = self._identity = ""

    def call(self, act: Callable[[Board], T]) -> T:
        """Do something on the board; raise Silent or HostGone if it does not answer soon."""
        known = self._open
        self._open = None  # until it has answered
        outcome: dict[str, Any] = {}
        patience_s = _PATIENCE_S if known is not None else _FIRST_PATIENCE_S
        thread = threading.Thread(target=self._act, args=(known, act, outcome), name="instep-line", daemon=True)
        thread.start()
        thread.join(patience_s)
        if "error" in outcome:
            raise outcome["error"]
        if "board" not in outcome:
            raise Silent(f"no answer within {patience_s:g} s")
        self._open = outcome["board"]
        answer: T = outcome["answer"]
        return answer

    def insist(self, act: Callable[[Board], T], patience_s: float) -> T:
        """Do something on the board that this process cannot go on without; it may be done more than once."""
        plan, deadline = self._board.plan, time.monotonic() + patience_s
        while True:
            try:
                return self.call(act)
            except (Silent, HostGone) as error:
                if isinstance(error, HostGone) or time.monotonic() > deadline:
                    how = "has ended" if isinstance(error, HostGone) else "no longer answers"
                    raise EnvironmentFailed(
                        f"The process that hosts {plan.host}:{plan.port}, where the machines of this job meet, {how}: "
                        f"{error}. Start the same command again on all machines."
                    ) from error
                time.sleep(_AGAIN_S)

    def _act(self, board: Board | None, act: Callable[[Board], Any], outcome: dict[str, Any]) -> None:
        try:
            if board is None:
                board = self._connect()
            outcome["answer"] = act(board)
            outcome["board"] = board
        except HostGone as error:
            outcome["error"] = error
        except (OSError, RuntimeError, dist.DistError) as error:
            outcome["error"] = Silent(str(error))

    def _connect(self) -> Board:
        plan = self._board.plan
        try:  # torch's own connecting says the same of a machine that is away and of a port that nobody holds
            with socket.create_connection((self._address or plan.host, plan.port), timeout=_PATIENCE_S) as trial:
                self._address = str(trial.getpeername()[0])  # the name is not asked for again: its server may go, too
        except ConnectionRefusedError as error:
            raise HostGone(f"{plan.host}:{plan.port} refuses connections") from error
        there = copy.copy(self._board)
        there.plan = dataclasses.replace(plan, host=self._address)
        board = there.line(_FIRST_PATIENCE_S)
        found = board.identity
        self._identity = self._identity or found
        if found != self._identity:
            raise HostGone(f"another process hosts {plan.host}:{plan.port} now")
        return board


def addresses_of(host: str) -> tuple[str, ...]:
    """Give the addresses that a name stands for here; the name itself if that cannot be told."""
    try:
        return tuple(_bare(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return (host,)


def hang_up(addresses: Collection[str], port: int) -> int:
    """End every connection of this process to one of these addresses, whoever waits on it; give how many there were."""
    count = 0
    with contextlib.suppress(OSError):  # too many open files: it is tried again
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or closed meanwhile
                count += _hang_up_on(os.dup(int(name)), addresses, port)
    return count


def _hang_up_on(own_fd: int, addresses: Collection[str], port: int) -> bool:
    try:
        line = socket.socket(fileno=own_fd)
    except OSError:
        os.close(own_fd)
        return False
    with line:
        peer = line.getpeername()
        if not isinstance(peer, tuple) or peer[1] != port or _bare(peer[0]) not in addresses:
            return False
        line.shutdown(socket.SHUT_RDWR)
        return True


def _bare(address: object) -> str:
    return str(address).partition("%")[0].removeprefix("::ffff:")
