"""Timeouts on TCP connections to other nodes: a pulled cable does not close a connection.

Without them a sender notices after a quarter of an hour, and a receiver never does. A short interruption does no harm:
the kernel sends lost packets again. This is for gloo's connections, whose receivers always read; a device's own backend
may send to a rank that reads much later, which looks the same as a lost node.

Ranks: each for its own sockets; issues no collectives.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

TCP_TIMEOUT_S = 15.0
"""Longer than the launchers take to notice a lost node (`--lost-after`): they explain it better."""


def open_sockets() -> frozenset[str]:
    """Return the sockets that this process has now, to tell later ones from them."""
    return frozenset(target for _, target in _fds())


def set_tcp_timeout(seconds: float, others: frozenset[str] = frozenset()) -> int:
    """Set the timeout of all connections to other nodes except `others`; return how many there are."""
    count = 0
    for fd, target in _fds():
        if target not in others:
            with contextlib.suppress(OSError):  # closed meanwhile
                count += _set_timeout(os.dup(fd), seconds)
    return count


def _fds() -> Iterator[tuple[int, str]]:
    """Yield this process's file descriptors, each with what it refers to; none elsewhere than on Linux."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _set_timeout(own_fd: int, seconds: float) -> bool:
    try:
        connection = socket.socket(fileno=own_fd)
    except OSError:  # not a socket
        os.close(own_fd)
        return False
    with connection:
        if not _is_remote(connection):
            return False
        milliseconds, every_s = int(seconds * 1000), max(1, int(seconds / 5))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, every_s)
        return True


def _is_remote(connection: socket.socket) -> bool:
    """Return whether a socket is a TCP connection to another node."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        peer, own = connection.getpeername()[0], connection.getsockname()[0]
    except OSError:  # it listens
        return False
    bare = ipaddress.ip_address(str(peer).partition("%")[0].removeprefix("::ffff:"))
    return peer != own and not bare.is_loopback
