"""The rendezvous of the ranks: where they connect, and over which network interface.

Ranks: each for itself.
"""

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

from instep.core.topology import Place
from instep.world.interfaces import address_towards, interface_of, is_loopback, socket_variables


def choose_interface(place: Place) -> None:
    """Make the backends use the interface that reaches rank 0's node, unless the user or the launcher chose one.

    On one node that is the loopback; by default gloo listens on the address that the host's name resolves to.
    """
    if not place.spans_nodes:
        if is_loopback(place.master_addr):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
        return
    own = address_towards(place.master_addr, place.master_port or 1)
    if own and not is_loopback(own):
        os.environ.update(socket_variables(interface_of(own), os.environ))


def rendezvous_arguments(place: Place, timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the arguments of init_process_group that say where to connect; on one node, on the loopback only."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts a store, which env:// uses
        return {"init_method": "env://"}
    if not is_loopback(place.master_addr):
        host = f"[{place.master_addr}]" if ":" in place.master_addr else place.master_addr
        address = "env://" if place.launcher == "torchrun" else f"tcp://{host}:{place.master_port}"
        return {"init_method": address}
    listening: dict[str, Any] = {}
    if place.is_main:  # by default torch listens on every interface
        with socket.create_server((place.master_addr, place.master_port), backlog=4096) as server:
            listening["master_listen_fd"] = os.dup(server.fileno())
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.master_addr, place.master_port, place.world_size, place.is_main, timeout, **listening
    )
    return {"store": store}
