"""Which of this machine's addresses and network interfaces reaches the others.

Room: asks the kernel; sends nothing, changes nothing, imports no torch. Ranks: each for itself.

Gloo takes the address that the host's own name stands for, elastic the name itself. Both are wrong where a name means
the loopback, a container's bridge or a network that the others are not on. The kernel knows which of its addresses it
would speak from to a given one.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from instep.core.errors import SpecError
from instep.world.device import ACCELERATORS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SIOCGIFCONF = 0x8912
_ROW_BYTES, _MOST_ROWS = 40, 256


def address_towards(host: str, port: int = 1) -> str:
    """Give the address of this machine that the kernel would use to speak to a host; empty: it knows no way."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.connect(address)  # a datagram socket: this looks the route up, and sends nothing
                own = str(trial.getsockname()[0])
            except OSError:
                continue
        if not ipaddress.ip_address(own.partition("%")[0]).is_unspecified:
            return own
    return ""


def is_loopback(address: str) -> bool:
    """Tell whether only this machine itself can be reached at an address; a name may be anybody's."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def own_address(name: str) -> str:
    """Give the address that a name of this machine stands for; an address, or nothing, stays as it is."""
    if not name:
        return ""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SpecError(f"local_addr={name!r} is no address, and no name that this machine knows: {error}.") from None
    return str(found[0][4][0])


def interfaces() -> dict[str, str]:
    """Give the interfaces that have an address: name and first address."""
    found: dict[str, str] = {}
    for address, name in (*_held_v4(), *_held_v6()):
        found.setdefault(name, str(address))
    return found


def interface_of(address: str) -> str:
    """Name the interface that holds an address; empty: none of this machine's does."""
    bare = ipaddress.ip_address(address.partition("%")[0])
    held = _held_v4() if bare.version == 4 else _held_v6()
    name = next((name for own, name in held if own == bare), "")
    # The whole of 127.0.0.0/8 is the loopback's, which holds one address of it.
    return name or next((name for own, name in held if bare.is_loopback and own.is_loopback), "")


def socket_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that make the ranks use an interface, without those that a person has set. Pure."""
    names = ("GLOO_SOCKET_IFNAME", *(a.socket_variable for a in ACCELERATORS.values()), "TP_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in environ}


def _held_v4() -> list[tuple[Address, str]]:
    rows = array.array("B", bytes(_ROW_BYTES * _MOST_ROWS))
    where, _ = rows.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, struct.pack("iP", len(rows), where))
    data = rows.tobytes()[: struct.unpack("iP", answer)[0]]
    starts = range(0, len(data), _ROW_BYTES)
    return [
        (ipaddress.IPv4Address(data[at + 20 : at + 24]), data[at : at + 16].split(b"\0")[0].decode()) for at in starts
    ]


def _held_v6() -> list[tuple[Address, str]]:
    path = Path("/proc/net/if_inet6")
    lines = path.read_text().split("\n") if path.exists() else []
    fields = [line.split() for line in lines if line.strip()]
    return [(ipaddress.IPv6Address(bytes.fromhex(each[0])), each[-1]) for each in fields]
