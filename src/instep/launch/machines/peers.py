"""Whether machines reach each other, how long that takes, and how much goes through: over plain TCP.

A listener answers on a free port. One byte says what the caller wants: nothing more than to be let in, its bytes
back, or its bytes counted. Nothing that comes in is kept or run.

Room: the network; imports no torch. Ranks: none; these are the processes that launch them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_PING, _FLOOD = b"p", b"f"
_PINGS = 20
_CHUNK_BYTES = 1 << 18
_FLOOD_S, _FLOOD_BYTES = 1.0, 1 << 28
"""A flood ends after so long, or so many bytes: on a fast link that is enough to see that it is one."""
_CALL_S = 10.0
REACH_S = 2.0


@dataclass(frozen=True)
class Address:
    """Where a machine's listener is."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} ({self.host})"


@dataclass(frozen=True)
class Link:
    """What was measured from one machine to another."""

    latency_s: float
    bits_per_s: float


class Listener:
    """Answers the other machines on a free port until it is closed."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="instep-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):  # wakes the thread; nothing is connected to a listener
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):  # passes
                    time.sleep(0.05)
                    continue
                return
            threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller, contextlib.suppress(OSError):  # whoever calls may hang up whenever it likes
        caller.settimeout(_CALL_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wish = caller.recv(1)
        if wish == _PING:
            while byte := caller.recv(1):
                caller.sendall(byte)
        elif wish == _FLOOD:
            count = 0
            buffer = bytearray(_CHUNK_BYTES)
            while size := caller.recv_into(buffer):
                count += size
            caller.sendall(count.to_bytes(8, "big"))


def reach(address: Address, timeout_s: float = REACH_S) -> str:
    """Try to connect to a machine's listener; give why not, empty: it worked."""
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s):
            return ""
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def unreached(own: Address, others: Mapping[int, Address]) -> list[str]:
    """Try to reach all others at once; say whom this machine cannot reach on which port, and why."""
    if not others:
        return []
    with ThreadPoolExecutor(min(64, len(others))) as pool:
        found = dict(zip(others, pool.map(reach, others.values()), strict=True))
    return [f"{own} cannot reach {others[key]} on port {others[key].port}: {why}" for key, why in found.items() if why]


def measure(address: Address) -> Link:
    """Measure the way to a machine's listener; an OSError says why that cannot be done."""
    return Link(_latency_s(address), _bits_per_s(address))


def _latency_s(address: Address) -> float:
    with _call(address, _PING) as line:
        times = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            line.sendall(b".")
            line.recv(1)
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _bits_per_s(address: Address) -> float:
    """Send for a while; the time counts until the other side has everything, not until it was handed over here."""
    data = memoryview(bytes(_CHUNK_BYTES))
    with _call(address, _FLOOD) as line:
        sent, begun = 0, time.perf_counter()
        while sent < _FLOOD_BYTES and time.perf_counter() - begun < _FLOOD_S:
            sent += line.send(data)
        line.shutdown(socket.SHUT_WR)
        count = int.from_bytes(line.recv(8), "big")
        took_s = time.perf_counter() - begun
    if count != sent:
        raise OSError(f"{sent} bytes were sent and {count} came")
    return 8 * count / took_s


def _call(address: Address, wish: bytes) -> socket.socket:
    line = socket.create_connection((address.host, address.port), timeout=_CALL_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(wish)
    return line
