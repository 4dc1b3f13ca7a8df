"""A fresh store for every attempt of a static rendezvous.

Elastic's static rendezvous lets the workers use the agent's own store, at the same address in every attempt
and without a prefix: after a restart, a rank may read where a dead one listened. So rank 0 hosts a new one,
on a free port, and the agent's store only says which.

Ranks: all. Not a collective: rank 0 sets a key, the others wait for it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(minutes=5)


def meet_anew(attempt: int) -> None:
    """Point MASTER_PORT at this attempt's own store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    key = f"instep/attempt-{attempt}/port"
    if os.environ["RANK"] == "0":
        with socket.create_server(("", 0)) as free:
            store.set(key, str(free.getsockname()[1]))
    os.environ["MASTER_PORT"] = store.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
