"""Know one's own name before others do.

In a cluster that has just started a machine, its name may not be resolved yet: not even by itself. Elastic tells by
the addresses of the endpoint's name whether it is to be the host of the meeting; without any, nobody would be.
"""

from __future__ import annotations

import dataclasses
import socket

from instep.launch.rendezvous import RendezvousPlan


def claim_own_name(plan: RendezvousPlan) -> RendezvousPlan:
    """Be the host of the meeting where the endpoint is this machine's name with a domain, and nobody knows it yet."""
    host = plan.rdzv_endpoint.rpartition(":")[0]
    if "is_host" in plan.rdzv_configs or plan.rdzv_backend != "c10d" or not begins(host, socket.gethostname()):
        return plan
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return dataclasses.replace(plan, rdzv_configs={**plan.rdzv_configs, "is_host": True})
    return plan


def begins(host: str, name: str) -> bool:
    """Tell whether a host is a machine's name with a domain behind it."""
    return bool(name) and host.lower().startswith(f"{name.lower()}.")
