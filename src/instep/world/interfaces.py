"""Which address and network interface of this node reaches the other nodes.

Ranks: each for itself. Asks the kernel and sends nothing.

Gloo uses the address that the host's name resolves to, elastic the name itself. Both are wrong where the name resolves
to the loopback, a container's bridge or a network that the other nodes are not on. The kernel knows which of its
addresses it would use to reach a given one.
"""

import ipaddress
import socket
from collections.abc import Mapping

from instep.core.errors import SpecError
from instep.world.device import ACCELERATORS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_towards(host: str, port: int = 1) -> str:
    """Return the address that the kernel would use to reach a host; empty: it has no route."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.connect(address)  # a datagram socket: looks the route up and sends nothing
                own = str(trial.getsockname()[0])
            except OSError:
                continue
        if not ipaddress.ip_address(own.partition("%")[0]).is_unspecified:
            return own
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only this machine; of names, only localhost is known to."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def own_address(name: str) -> str:
    """Return the address that a name of this machine resolves to; an address, or nothing, stays as it is."""
    if not name:
        return ""
    try:
        resolved = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SpecError(
            f"local_addr={name!r} is neither an address nor a name that this machine can resolve: {error}."
        ) from None
    return str(resolved[0][4][0])


def interfaces() -> dict[str, str]:
    """Return the first address of each interface that has one, IPv4 before IPv6."""
    by_name: dict[str, str] = {}
    for address, name in sorted(_addresses(), key=lambda pair: pair[0].version):
        by_name.setdefault(name, str(address))
    return by_name


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty: none of this machine's."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    held = [(own, name) for own, name in _addresses() if own.version == wanted.version]
    name = next((name for own, name in held if own == wanted), "")
    # The whole of 127.0.0.0/8 is the loopback's, which has one address of it.
    return name or next((name for own, name in held if wanted.is_loopback and own.is_loopback), "")


def socket_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make the backends use an interface, without those that the user has set. Pure."""
    own = filter(None, (accelerator.socket_variable for accelerator in ACCELERATORS.values()))
    names = ("GLOO_SOCKET_IFNAME", *own, "TP_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in environ}


def _addresses() -> list[tuple[Address, str]]:
    """Return the addresses of this machine, each with its interface."""
    import psutil  # 15 ms, which a world of one need not spend

    rows = ((name, row) for name, rows in psutil.net_if_addrs().items() for row in rows)
    families = (socket.AF_INET, socket.AF_INET6)
    return [(ipaddress.ip_address(r.address.partition("%")[0]), name) for name, r in rows if r.family in families]
