"""Whether nodes reach each other, how far their clocks differ, and how fast the links are: over plain TCP.

Each launcher has a listener on a free port. The first byte of a caller says what it wants: nothing more than to
connect, the time for each byte, or its bytes counted. Nothing that comes in is kept or run.

Ranks: none; these are the launchers.
"""

import contextlib
import errno
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from instep.launch.membership.clock_offset import Offset, Ping, estimate_offset

_PING, _FLOOD = b"p", b"f"
_NUM_PINGS, _NUM_OFFSET_PINGS = 20, 7
_CHUNK_BYTES = 1 << 18
_FLOOD_S, _FLOOD_BYTES = 1.0, 1 << 28
"""A bandwidth test ends after this time, or this many bytes, which is enough on a fast link."""
_CALL_S = 10.0
_REACH_S = 2.0
_TIME_BYTES = 8


@dataclass(frozen=True)
class Address:
    """Where the listener of a node is."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} ({self.host})"


@dataclass(frozen=True)
class Link:
    """What was measured from one node to another."""

    latency_s: float
    bits_per_s: float


class Listener:
    """Answers the other nodes on a free port until it is closed."""

    def __init__(self, host: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
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
            threading.Thread(target=_answer, args=(caller, self._clock), daemon=True).start()


def _answer(caller: socket.socket, clock: Callable[[], int]) -> None:
    with caller, contextlib.suppress(OSError):  # a caller may hang up at any time
        caller.settimeout(_CALL_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = caller.recv(1)
        if request == _PING:
            while caller.recv(1):
                caller.sendall(clock().to_bytes(_TIME_BYTES, "big"))
        elif request == _FLOOD:
            count = 0
            buffer = bytearray(_CHUNK_BYTES)
            while size := caller.recv_into(buffer):
                count += size
            caller.sendall(count.to_bytes(8, "big"))


def reach(address: Address) -> str:
    """Try to connect to the listener of a node; return why that failed, empty if it worked."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_REACH_S):
            return ""
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def unreached(own: Address, others: Mapping[int, Address]) -> list[str]:
    """Try to reach all other nodes at once; return a sentence for each one that cannot be reached."""
    with ThreadPoolExecutor(64) as pool:
        reasons = zip(others.values(), pool.map(reach, others.values()), strict=True)
    return [f"{own} cannot reach {other} on port {other.port}: {why}" for other, why in reasons if why]


def measure_offset(address: Address, clock: Callable[[], int]) -> Offset:
    """Return how far `clock` is ahead of a node's clock; raise OSError if that node does not answer."""
    return estimate_offset(_ping(address, clock, _NUM_OFFSET_PINGS, _REACH_S))


def measure(address: Address) -> Link:
    """Measure the link to a node; raise OSError if it does not answer."""
    pings = _ping(address, time.perf_counter_ns, _NUM_PINGS, _CALL_S)
    latency_ns = statistics.median(ping.received_ns - ping.sent_ns for ping in pings)
    return Link(latency_ns / 1e9, _bits_per_s(address))


def _ping(address: Address, clock: Callable[[], int], count: int, timeout_s: float) -> list[Ping]:
    pings = []
    with _call(address, _PING, timeout_s) as connection:
        for _ in range(count):
            sent_ns = clock()
            connection.sendall(b".")
            answer = connection.recv(_TIME_BYTES, socket.MSG_WAITALL)
            received_ns = clock()
            if len(answer) < _TIME_BYTES:
                raise OSError(f"{address} hung up")
            pings.append(Ping(sent_ns, int.from_bytes(answer, "big"), received_ns))
    return pings


def _bits_per_s(address: Address) -> float:
    """Send for a while and return the rate, timed until the other node has received everything."""
    data = memoryview(bytes(_CHUNK_BYTES))
    with _call(address, _FLOOD, _CALL_S) as connection:
        sent, begun = 0, time.perf_counter()
        while sent < _FLOOD_BYTES and time.perf_counter() - begun < _FLOOD_S:
            sent += connection.send(data)
        connection.shutdown(socket.SHUT_WR)
        count = int.from_bytes(connection.recv(8), "big")
        took_s = time.perf_counter() - begun
    if count != sent:
        raise OSError(f"{sent} bytes were sent and {count} came")
    return 8 * count / took_s


def _call(address: Address, request: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(request)
    return connection
