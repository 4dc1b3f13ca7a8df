"""A board that the launching processes of several machines write on and read from.

It lives in a store at the rendezvous endpoint, hosted by the launching process whose machine the endpoint names, from
before elastic starts ranks until that process ends; elastic uses the same store. Values are JSON, never pickled. One
connection does one thing at a time: whoever waits on the board in a thread of its own opens a `line` of its own.

Room: the network, through torch's store. Ranks: none; these are the processes that launch them.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from instep.core.errors import EnvironmentFailed
from instep.launch.machines.knock import knock

_TRY_S = 3.0
"""How long one try to reach the host takes: between two of them, Ctrl-C is heard."""
_OWNER = "instep-board/job"
"""Whose board it is: not under a job's name, so that every job sees it."""
_HOST = "instep-board/host"
_MOST_STRANGE = 3
"""So often whoever listens may answer as no board does: one that has only just begun may be slow."""


@dataclass(frozen=True)
class BoardPlan:
    """Where the board is, and whether this process is to host it."""

    host: str
    port: int
    job: str
    """What is written under one job's name is not seen under another's."""
    is_host: bool | None
    """None: if the endpoint names this machine, and nobody else here was first."""
    join_timeout_s: float = 600.0


class Board:
    """One connection to the board."""

    def __init__(self, plan: BoardPlan, store: TCPStore, is_host: bool) -> None:
        self.plan = plan
        self.is_host = is_host
        """Whether the board ends with this process."""
        self.has_host = is_host
        """Whether one of the launching processes hosts it, not a store that somebody else keeps."""
        self._server = store
        self._store = PrefixStore(f"instep-board/{plan.job}", store)

    @classmethod
    def open(
        cls, plan: BoardPlan, say: Callable[[str], object], is_stopped: Callable[[], bool] = lambda: False
    ) -> Board:
        """Host the board or reach it; `say` is told, once, when its host takes longer."""
        deadline, said, strange = time.monotonic() + plan.join_timeout_s, False, 0
        while True:
            refused = ""
            # Asked each time: a machine that has just been started may not know its own name yet.
            if plan.is_host or (plan.is_host is None and is_here(plan.host)):
                try:
                    return cls._host(plan)
                except (dist.DistError, RuntimeError) as error:
                    refused = _first_line(error)
            answer = knock(plan.host, plan.port)
            if answer == "store":  # of another machine; or of one that was given the same number as this one
                return cls._reach(plan)
            if answer == "nobody" and "failed to listen" in refused:
                raise EnvironmentFailed(_taken(plan, refused))
            strange += answer != "nobody"
            if strange == _MOST_STRANGE:
                raise EnvironmentFailed(_taken(plan, "another program listens there, which does not answer as instep"))
            if is_stopped():
                raise EnvironmentFailed("asked to stop while waiting for other machines.")
            if time.monotonic() > deadline:
                raise EnvironmentFailed(_unreached(plan))
            if not said:
                said = True
                say(f"waiting for the machine that hosts {plan.host}:{plan.port}")
            time.sleep(0.2)

    @classmethod
    def _host(cls, plan: BoardPlan) -> Board:
        """Host the board; whoever only believes to do so finds the one that the endpoint leads to."""
        board = cls(plan, _connect(plan, is_master=True), is_host=True)
        board._check_owner(board._server.compare_set(_OWNER, "", plan.job).decode())
        own = uuid.uuid4().hex
        board.is_host = board._server.compare_set(_HOST, "", own).decode() == own
        return board

    @classmethod
    def _reach(cls, plan: BoardPlan) -> Board:
        """Connect to the board that another process hosts."""
        try:
            board = cls(plan, _connect(plan, is_master=False), is_host=False)
        except (dist.DistError, RuntimeError) as error:
            raise EnvironmentFailed(_taken(plan, _first_line(error))) from error
        until = time.monotonic() + _TRY_S
        while not board.has_host and time.monotonic() < until:
            if board._server.check([_OWNER]):
                board._check_owner(board._server.get(_OWNER).decode())
                board.has_host = True
            else:  # its host has only just opened it, or it is a store that somebody else keeps
                time.sleep(0.05)
        return board

    def _check_owner(self, owner: str) -> None:
        if owner != self.plan.job:
            raise EnvironmentFailed(
                f"{self.plan.host}:{self.plan.port} is where the job {owner!r} meets, and this one is "
                f"{self.plan.job!r}: it would end with that job. Give all machines the same --rdzv-id if they belong "
                "together, else this job another --rdzv-endpoint."
            )

    def line(self, timeout_s: float) -> Board:
        """Open another connection, for another thread; what it waits for may take so long."""
        board = Board(self.plan, _connect(self.plan, is_master=False, timeout_s=timeout_s), is_host=False)
        board.has_host = self.has_host
        return board

    @property
    def identity(self) -> str:
        """What tells this board from every other one: two machines that each host one have not met."""
        return self.claim("identity", uuid.uuid4().hex)

    def store_for(self, timeout_s: float) -> PrefixStore:
        """Give a part of the store to elastic, over a connection of its own."""
        return PrefixStore(f"instep-elastic/{self.plan.job}", _connect(self.plan, is_master=False, timeout_s=timeout_s))

    def post(self, key: str, value: Any) -> None:
        """Write a value for all to read; a later one replaces it."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any | None:
        """Give the value that was posted; None: there is none yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, key: str) -> Any:
        """Give a value, once it is posted; an error of torch's if that takes longer than this connection may."""
        return json.loads(self._store.get(key))

    def drop(self, key: str) -> None:
        """Take a value away."""
        self._store.delete_key(key)

    def add(self, key: str, amount: int = 1) -> int:
        """Count: give the total, this amount included."""
        return int(self._store.add(key, amount))

    def claim(self, key: str, value: str) -> str:
        """Write a value unless somebody has; give the one that is there."""
        return str(self._store.compare_set(key, "", value).decode())


def is_here(host: str) -> bool:
    """Tell whether a name or an address is one of this machine's: only then something can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:
                continue
            return True
    return False


def _connect(plan: BoardPlan, *, is_master: bool, timeout_s: float = _TRY_S) -> TCPStore:
    return TCPStore(
        plan.host,
        plan.port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # elastic opens the same port again, in this process
    )


def _taken(plan: BoardPlan, why: str) -> str:
    return (
        f"The machines cannot meet at {plan.host}:{plan.port}: {why}. Another job or program may hold the port: give "
        "all machines another --rdzv-endpoint."
    )


def _unreached(plan: BoardPlan) -> str:
    return (
        f"Nobody answered at {plan.host}:{plan.port} for {plan.join_timeout_s:.0f} s. Start the same command on that "
        "machine, and see that the address can be reached from here."
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
