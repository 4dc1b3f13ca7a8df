"""Let connections to other machines end when nothing is heard over them: a pulled cable says nothing by itself.

Without this, whoever sends over one learns of it after a quarter of an hour, and whoever waits to receive never does.
A short cut heals: the kernel sends again what was lost. This is for gloo's connections, whose ends read what comes;
a device's own backend may send to a rank that will read much later, which looks the same.

Room: this process's own sockets. Ranks: each for itself; issues no collectives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass

TCP_TIMEOUT_S = 15.0
"""Longer than the launching processes take to notice a lost machine (`--lost-after`), who say more about it."""


def open_sockets() -> frozenset[str]:
    """Give what tells this process's sockets from those that it will open later."""
    found = set()
    for name in _fds():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return frozenset(found)


def limit_tcp_silence(seconds: float, others: frozenset[str] = frozenset()) -> int:
    """Set how long nothing may be heard over connections to other machines, but for `others`; give their number."""
    count = 0
    for name in _fds():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") not in others:
                count += _limit(os.dup(int(name)), seconds)
    return count


def _fds() -> list[str]:
    return os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []  # elsewhere than on Linux


def _limit(own_fd: int, seconds: float) -> bool:
    try:
        connection = socket.socket(fileno=own_fd)
    except OSError:  # no socket
        os.close(own_fd)
        return False
    with connection:
        if not _leads_elsewhere(connection):
            return False
        milliseconds, every_s = int(seconds * 1000), max(1, int(seconds / 5))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, every_s)
        return True


def _leads_elsewhere(connection: socket.socket) -> bool:
    """Tell whether a socket is a TCP connection to another address than this machine's own."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        peer, own = connection.getpeername()[0], connection.getsockname()[0]
    except OSError:  # it listens
        return False
    bare = ipaddress.ip_address(str(peer).partition("%")[0].removeprefix("::ffff:"))
    return peer != own and not bare.is_loopback


@dataclass(frozen=True)
class TcpTimeout:
    """How long nothing may be heard over the group's connections to other machines."""

    seconds: float
    others: frozenset[str]
    """Sockets that are not the group's."""

    def limit(self) -> None:
        """Let connections end that are silent for longer."""
        limit_tcp_silence(self.seconds, self.others)
