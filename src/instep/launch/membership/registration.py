"""How a node becomes known: it opens a listener and registers once in the control store.

Ranks: none; these are the launchers.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from instep.core.launch_spec import LaunchSpec
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.node_info import HOST_KEY, JobRequest, NodeInfo, describe_node, installed_packages
from instep.launch.membership.peers import Listener
from instep.launch.membership.store_client import StoreClient, resolve
from instep.world.interfaces import address_towards, is_loopback, own_address


@contextlib.contextmanager
def registered(
    store: ControlStore, spec: LaunchSpec, request: JobRequest, clock: Callable[[], int] = time.time_ns
) -> Iterator[NodeInfo]:
    """Write what this node is to the control store, under a key of its own; its listener answers within the block."""
    plan, client, is_static = store.plan, StoreClient(store), spec.rdzv_backend == "static"
    address = own_address(spec.local_addr) or address_towards(plan.host, plan.port) or "127.0.0.1"
    # The others may reach the host of the store at another address than the one that it would choose itself.
    everywhere = "::" if ":" in address else "0.0.0.0"  # noqa: S104 - as the store and gloo do; see docs/recovery.md
    listens_at = everywhere if store.is_host and not is_loopback(address) else address
    with contextlib.closing(Listener(listens_at, clock)) as listener:
        # The host comes first, so that rank 0 runs there. The other keys may have gaps, since a call may run twice.
        key = HOST_KEY if store.is_host else client.insist(lambda store: store.add("nodes"), spec.lost_after_s)
        node = NodeInfo(
            key=key,
            address=address,
            store_address="" if store.is_host and spec.local_addr else resolve(plan.host)[0],
            port=listener.port,
            pid=os.getpid(),
            node_rank=spec.node_rank if spec.node_rank is not None or not is_static else 0,
            nnodes=spec.nnodes,
            backend=spec.rdzv_backend,
            request=request.values,
            record=describe_node(map(Path, request.code)),
            packages=installed_packages(),
        )
        client.insist(lambda store: store.set(f"node/{key}", node), spec.lost_after_s)
        yield node


def registered_keys(store: ControlStore) -> range:
    """Return the keys that nodes may have."""
    return range(HOST_KEY, store.add("nodes", 0) + 1)


def read_node(store: ControlStore, key: int) -> NodeInfo | None:
    """Return what a node registered; None if there is none with that key."""
    values = store.get(f"node/{key}")
    return NodeInfo.from_json(values) if values is not None else None
