"""Open a lane: find out who shares a machine, share memory, and agree whether all could.

Ranks: all of the group. What any rank cannot do, none does: then the reason is known to all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from instep.world.lane import engine
from instep.world.lane.block import Block, BlockAddress
from instep.world.lane.lane import Lane, block_bytes, prepare
from instep.world.lane.machines import MachinesPlan, plan_machines


class Store(Protocol):
    """What is needed of c10d's store."""

    def set(self, key: str, value: str) -> None:
        """Say something."""

    def get(self, key: str) -> bytes:
        """Wait until it was said."""


class Opened(NamedTuple):
    """What came of it."""

    lane: Lane | None
    """None on a machine with one rank of this group, and where `refusal` says why nobody has one."""
    plan: MachinesPlan
    refusal: str = ""


def machine_label() -> str:
    """Name the machine so that processes with the same label can share memory, and no others.

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
) -> Opened:
    """Bring the ranks of a group together, machine by machine. Called on all ranks of the group."""
    compiled = engine.load()
    labels, pids, ways = _introduce(store, rank, size, label, compiled is not None)
    plan = plan_machines(labels)
    refusal = next((text[1:] for text in labels if text.startswith("!")), "")
    if refusal:
        return Opened(None, plan, refusal)
    if not plan.shares:
        return Opened(None, plan, "no two ranks share a machine" if size > 1 else "there is only one rank")
    machine, place = plan.where(rank)
    ranks = plan.machines[machine]
    block, failure = _share(store, machine, place, len(ranks))
    store.set(f"mapped/{rank}", failure)
    refusal = next((f for r in range(size) if (f := store.get(f"mapped/{r}").decode())), "")
    if block is not None and place == 0:
        block.settle()
    if refusal or block is None:
        return Opened(None, plan, refusal)
    names = [global_ranks[r] if global_ranks else r for r in ranks]
    pids_here, timeout_s = [pids[r] for r in ranks], timeout.total_seconds()
    return Opened(
        Lane(block, place, names, pids_here, timeout_s, compiled if ways.compiled else None, ways.threads), plan
    )


class _Ways(NamedTuple):
    """What all ranks can do: whether they have the compiled loops, and with how many threads one of them computes."""

    compiled: bool
    threads: int


def _introduce(
    store: Store, rank: int, size: int, label: str | None, compiled: bool
) -> tuple[list[str], list[int], _Ways]:
    """Give the ranks' machines and processes, and what all of them can do."""
    try:
        label = label or machine_label()
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:  # not Linux, or an old one, or /proc is not there
        label = f"!rank {rank} cannot see the processes of its machine: {error}"
    store.set(f"who/{rank}", json.dumps([label, os.getpid(), compiled, torch.get_num_threads()]))
    labels, pids, have, threads = zip(*(json.loads(store.get(f"who/{r}")) for r in range(size)), strict=True)
    return list(labels), list(pids), _Ways(all(have), max(threads))


def _share(store: Store, machine: int, place: int, size: int) -> tuple[Block | None, str]:
    """Make this machine's block, or map the one that its first rank makes; give it, or say why not."""
    if size == 1:
        return None, ""
    key = f"block/{machine}"
    try:
        if place == 0:
            block = Block.make(block_bytes(size))
            prepare(block, size)
            store.set(key, json.dumps(block.address))
            return block, ""
        found = json.loads(store.get(key))
        return (Block.map(BlockAddress(*found)), "") if found else (None, "")
    except OSError as error:
        if place == 0:
            store.set(key, "null")
        return None, f"memory cannot be shared on this machine: {error}"
