"""The control store: the key-value store through which the launchers of several nodes talk.

It is a TCPStore at the rendezvous endpoint, hosted by the launcher whose node the endpoint names, from before elastic
starts ranks until that launcher ends; elastic uses the same store. Values are JSON, never pickled. One connection does
one thing at a time, so each thread that waits on the store opens a connection of its own.

Ranks: none; these are the launchers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from instep.core.errors import EnvironmentFailed
from instep.launch.membership.rendezvous import StorePlan

_TRY_S = 3.0
"""How long one attempt to reach the host takes; Ctrl-C is handled between two of them."""
_ANSWER_S = 2.0
_OWNER = "instep-store/job"
"""The job that the store belongs to. The key has no job's prefix, so that every job sees it."""
_HOST = "instep-store/host"
_MAX_FOREIGN_ANSWERS = 3
"""How often a listener may answer as no store does: a store that is only just starting may be slow."""

Answer = Literal["store", "nobody", "foreign"]
"""What listens at an endpoint: a store; nothing, or it cannot be reached; another program, or a host that is slow."""
_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE
_GREETING, _ECHO = struct.Struct("=BIBI"), struct.Struct("=I")


class ControlStore:
    """One connection to the control store."""

    def __init__(self, plan: StorePlan, store: TCPStore, is_host: bool, has_host: bool) -> None:
        self.plan = plan
        self.is_host = is_host
        """Whether the store ends with this process."""
        self.has_host = has_host
        """Whether one of the launchers hosts it; False for a store that another program keeps."""
        self._server = store
        self._store = PrefixStore(f"instep-store/{plan.job}", store)

    @classmethod
    def open(
        cls, plan: StorePlan, say: Callable[[str], object], is_stopped: Callable[[], bool] = lambda: False
    ) -> ControlStore:
        """Host the store or connect to it; tell `say` once when that takes longer."""
        deadline, said, num_foreign = time.monotonic() + plan.join_timeout_s, False, 0
        while True:
            refused = ""
            # Asked each time: a machine that was just started may not know its own name yet.
            if plan.is_host or (plan.is_host is None and is_here(plan.host)):
                try:
                    return cls._host(plan)
                except (dist.DistError, RuntimeError) as error:
                    refused = _first_line(error)
            answer = probe_store(plan.host, plan.port)
            if answer == "store":  # of another node; or of one that was given the same node rank as this one
                return cls._reach(plan)
            if answer == "nobody" and "failed to listen" in refused:
                raise _unusable(plan, refused)
            num_foreign += answer == "foreign"
            if num_foreign == _MAX_FOREIGN_ANSWERS:
                raise _unusable(plan, "another program listens there, which does not answer as instep")
            if is_stopped():
                raise EnvironmentFailed("asked to stop while waiting for other nodes.")
            if time.monotonic() > deadline:
                raise EnvironmentFailed(
                    f"Nobody answered at {plan.host}:{plan.port} for {plan.join_timeout_s:.0f} s. Start the same "
                    "command on that node, and check that the address can be reached from here."
                )
            if not said:
                said = True
                say(f"waiting for the node that hosts {plan.host}:{plan.port}")
            time.sleep(0.2)

    @classmethod
    def _host(cls, plan: StorePlan) -> ControlStore:
        """Host the store, or use the one that the endpoint leads to if another process hosts it."""
        store = cls(plan, _connect(plan, is_master=True), is_host=True, has_host=True)
        store._check_owner(store._server.compare_set(_OWNER, "", plan.job).decode())
        own = uuid.uuid4().hex
        store.is_host = store._server.compare_set(_HOST, "", own).decode() == own
        return store

    @classmethod
    def _reach(cls, plan: StorePlan) -> ControlStore:
        """Connect to the store that another process hosts."""
        try:
            store = cls(plan, _connect(plan, is_master=False), is_host=False, has_host=False)
        except (dist.DistError, RuntimeError) as error:
            raise _unusable(plan, _first_line(error)) from error
        until = time.monotonic() + _TRY_S
        while not store.has_host and time.monotonic() < until:
            if store._server.check([_OWNER]):
                store._check_owner(store._server.get(_OWNER).decode())
                store.has_host = True
            else:  # its host has only just opened it, or it is a store that another program keeps
                time.sleep(0.05)
        return store

    def _check_owner(self, owner: str) -> None:
        if owner != self.plan.job:
            raise EnvironmentFailed(
                f"{self.plan.host}:{self.plan.port} belongs to the job {owner!r}, and this one is {self.plan.job!r}: "
                "it would end with that job. Give all nodes the same --rdzv-id if they belong together, else give "
                "this job another --rdzv-endpoint."
            )

    def connect(self, timeout_s: float, host: str = "") -> ControlStore:
        """Return another connection, for another thread; `host` is an address of the same host."""
        server = _connect(self.plan, is_master=False, timeout_s=timeout_s, host=host)
        return ControlStore(self.plan, server, is_host=False, has_host=self.has_host)

    @property
    def identity(self) -> str:
        """A value that differs between any two stores: two nodes that each host one have not met."""
        return self.claim("identity", uuid.uuid4().hex)

    def elastic_store(self, generation: int, timeout_s: float) -> PrefixStore:
        """Return a part of the store for elastic in one generation, over a connection of its own."""
        store = _connect(self.plan, is_master=False, timeout_s=timeout_s)
        return PrefixStore(f"instep-elastic/{self.plan.job}/generation-{generation}", store)

    def set(self, key: str, value: Any) -> None:
        """Write a value, plain or a dataclass of plain values; a later one replaces it."""
        self._store.set(key, json.dumps(value, default=dataclasses.asdict))

    def get(self, key: str) -> Any | None:
        """Return the value of a key; None if there is none yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return the new total."""
        return int(self._store.add(key, amount))

    def claim(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the one that is there."""
        return str(self._store.compare_set(key, "", value).decode())


def probe_store(host: str, port: int) -> Answer:
    """Return what listens at an endpoint.

    torch's TCPStore cannot be asked: its constructor waits for ever for the answer of a program that accepts and says
    nothing, whatever its timeout, and prints C++ stacks when it gets a wrong answer (torch 2.13). So the first bytes of
    its protocol are sent here, with a time limit: validate, then ping, whose number comes back.
    """
    number = os.getpid() & 0x7FFFFFFF
    try:
        connection = socket.create_connection((host, port), _ANSWER_S)
    except OSError:  # nothing listens, the name is unknown, no route: perhaps not yet
        return "nobody"
    with connection:
        try:
            connection.sendall(_GREETING.pack(_VALIDATE, _MAGIC, _PING, number))
            answer = connection.recv(_ECHO.size, socket.MSG_WAITALL)
        except OSError:
            return "foreign"
    return "store" if answer == _ECHO.pack(number) else "foreign"


def is_here(host: str) -> bool:
    """Return whether a name or an address is one of this machine's: only then a socket can be bound to it."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
            trial.bind(address)
            return True
    return False


def _connect(plan: StorePlan, *, is_master: bool, timeout_s: float = _TRY_S, host: str = "") -> TCPStore:
    return TCPStore(
        host or plan.host,
        plan.port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # elastic opens the same port again, in this process
    )


def _unusable(plan: StorePlan, why: str) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"The nodes cannot meet at {plan.host}:{plan.port}: {why}. Another job or program may hold the port: give "
        "all nodes another --rdzv-endpoint."
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
