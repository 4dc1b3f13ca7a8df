"""Set a lane up: find out which ranks share a node, map the shared memory, and agree whether all could.

Ranks: all of the group. What one rank cannot do, none does: then all of them know the reason.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch

from instep.world.lane import engine
from instep.world.lane.barrier import create_semaphores
from instep.world.lane.block import Block, BlockAddress
from instep.world.lane.lane import Lane, block_bytes


@dataclass(frozen=True)
class NodePlan:
    """The ranks of a group by node: in their order within a node, the nodes by their lowest rank."""

    nodes: tuple[tuple[int, ...], ...]

    def where(self, rank: int) -> tuple[int, int]:
        """Return a rank's node, and its local rank there."""
        for node, ranks in enumerate(self.nodes):
            if rank in ranks:
                return node, ranks.index(rank)
        raise AssertionError(f"rank {rank} is on no node")

    @property
    def num_inter_node_groups(self) -> int:
        """How many ranks of each node communicate with the other nodes, each for its share of a chunk."""
        return min(map(len, self.nodes))


def plan_nodes(labels: Sequence[str]) -> NodePlan:
    """Group ranks by the label of their node, given in the order of the ranks."""
    by_label: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        by_label.setdefault(label, []).append(rank)
    return NodePlan(tuple(tuple(ranks) for ranks in by_label.values()))


class Store(Protocol):
    """What is needed of c10d's store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""


def node_label() -> str:
    """Return a label that is equal for processes that can share memory, and for no others.

    Two containers on one host have the same boot id, but see each other's processes only in one PID namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def open_lane(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    global_ranks: Sequence[int] | None = None,
    label: str | None = None,
) -> tuple[Lane | None, NodePlan, str]:
    """Return this node's lane (None where the rank is alone), which ranks share nodes, and why no node has a lane.

    The last is empty where there are lanes. Called on all ranks of the group.
    """
    compiled = engine.load()
    try:
        label = label or node_label()
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # not Linux, or an old one, or without /proc
        label = f"!rank {rank} cannot see the processes of its node: {error}"
    store.set(f"who/{rank}", json.dumps([label, os.getpid(), compiled is not None, torch.get_num_threads()]))
    labels, pids, are_compiled, threads = zip(*(json.loads(store.get(f"who/{r}")) for r in range(size)), strict=True)
    plan = plan_nodes(labels)
    refusal = next((text[1:] for text in labels if text.startswith("!")), "")
    if refusal:
        return None, plan, refusal
    if len(plan.nodes) == size:
        return None, plan, "no two ranks share a node" if size > 1 else "there is only one rank"
    node, local_rank = plan.where(rank)
    ranks = plan.nodes[node]
    block, failure = _share(store, node, local_rank, len(ranks))
    store.set(f"mapped/{rank}", failure)
    refusal = next((f for r in range(size) if (f := store.get(f"mapped/{r}").decode())), "")
    if block is not None and local_rank == 0:
        os.close(block.address.fd)  # all have mapped it, and the mappings keep the memory
    if refusal or block is None:
        return None, plan, refusal
    names = [global_ranks[r] if global_ranks else r for r in ranks]
    pids_here, timeout_s = [pids[r] for r in ranks], timeout.total_seconds()
    lane = Lane(block, local_rank, names, pids_here, timeout_s, compiled if all(are_compiled) else None, max(threads))
    return lane, plan, ""


def _share(store: Store, node: int, local_rank: int, size: int) -> tuple[Block | None, str]:
    """Return this node's block, which its first rank makes and the others map; or None and the reason."""
    if size == 1:
        return None, ""
    key = f"block/{node}"
    try:
        if local_rank == 0:
            block = Block.make(block_bytes(size))
            create_semaphores(block.pointer + Block.HEADER_BYTES, size)
            store.set(key, json.dumps(block.address))
            return block, ""
        address = json.loads(store.get(key))
        return (Block.map(BlockAddress(*address)), "") if address else (None, "")
    except OSError as error:
        if local_rank == 0:
            store.set(key, "null")
        return None, f"memory cannot be shared on this node: {error}"
