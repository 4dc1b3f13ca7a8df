"""A client of the control store that never blocks its caller for long, and a way to end connections that would.

torch's store waits without end for an answer once its request is out: over a cut cable that is a quarter of an hour.
So each call runs in a thread of its own, which is abandoned with its connection when it takes too long.

Ranks: none; these are the launchers.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from instep.core.errors import EnvironmentFailed
from instep.launch.membership.control_store import ControlStore

T = TypeVar("T")

_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 3.0
"""A new connection takes a few round trips."""
_RETRY_S = 0.1


class StoreTimeout(Exception):
    """The control store did not answer in time."""


class HostGone(Exception):
    """The machine of the control store answers, but the process that hosted it has ended."""


class StoreClient:
    """Calls the control store, on a new connection whenever the old one is of no use."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._connection: ControlStore | None = None
        self._address = self._identity = ""

    def call(self, act: Callable[[ControlStore], T]) -> T:
        """Run `act` on the store; raise StoreTimeout or HostGone if there is no answer soon."""
        connection, self._connection = self._connection, None  # until it has answered
        timeout_s = _TIMEOUT_S if connection is not None else _CONNECT_TIMEOUT_S
        future: Future[tuple[ControlStore, T]] = Future()

        def run() -> None:
            try:
                own = connection or self._connect()
                future.set_result((own, act(own)))
            except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                future.set_exception(error)

        threading.Thread(target=run, name="instep-store", daemon=True).start()
        try:
            self._connection, answer = future.result(timeout_s)
        except (OSError, RuntimeError, dist.DistError) as error:
            raise StoreTimeout(str(error) or f"no answer within {timeout_s:g} s") from error
        return answer

    def insist(self, act: Callable[[ControlStore], T], patience_s: float) -> T:
        """Run `act`, which this launcher cannot continue without; it may run more than once."""
        plan, deadline = self._store.plan, time.monotonic() + patience_s
        while True:
            try:
                return self.call(act)
            except (StoreTimeout, HostGone) as error:
                if isinstance(error, HostGone) or time.monotonic() > deadline:
                    how = "has ended" if isinstance(error, HostGone) else "no longer answers"
                    raise EnvironmentFailed(
                        f"The process that hosts {plan.host}:{plan.port}, where the nodes meet, {how}: {error}. Start "
                        "the same command again on all nodes."
                    ) from error
                time.sleep(_RETRY_S)

    def _connect(self) -> ControlStore:
        plan = self._store.plan
        try:  # torch's own connecting fails alike for a machine that is away and for a port that nobody listens on
            with socket.create_connection((self._address or plan.host, plan.port), timeout=_TIMEOUT_S) as trial:
                self._address = str(trial.getpeername()[0])  # the name is not resolved again: its server may go, too
        except ConnectionRefusedError as error:
            raise HostGone(f"{plan.host}:{plan.port} refuses connections") from error
        connection = self._store.connect(_CONNECT_TIMEOUT_S, self._address)
        identity = connection.identity
        self._identity = self._identity or identity
        if identity != self._identity:
            raise HostGone(f"another process hosts {plan.host}:{plan.port} now")
        return connection


def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of a host name; the name itself if it cannot be resolved."""
    try:
        return tuple(_bare(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return (host,)


def hang_up(addresses: Collection[str], port: int) -> int:
    """Shut down every connection of this process to one of these addresses; return how many there were."""
    count = 0
    with contextlib.suppress(OSError):  # too many open files: it is tried again
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or closed meanwhile
                count += _hang_up_on(os.dup(int(name)), addresses, port)
    return count


def _hang_up_on(own_fd: int, addresses: Collection[str], port: int) -> bool:
    try:
        connection = socket.socket(fileno=own_fd)
    except OSError:
        os.close(own_fd)
        return False
    with connection:
        peer = connection.getpeername()
        if not isinstance(peer, tuple) or peer[1] != port or _bare(peer[0]) not in addresses:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def _bare(address: object) -> str:
    return str(address).partition("%")[0].removeprefix("::ffff:")
