"""Reduce 200 MB on two ranks with a /dev/shm of a given size; for a process with mounts of its own."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

from instep.world.lane.lane import block_bytes
from instep.world.world import World
from ranks import run_ranks

NUM_ELEMENTS = 50 * 10**6


def reduce_much(world: World) -> dict[str, Any]:
    tensor = torch.full((NUM_ELEMENTS,), float(world.rank + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world.all_reduce(tensor)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    mapped = re.search(r"/memfd:instep .*\nSize: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return {
        "backend": world.backend,
        "right": bool((tensor == 3).all()),
        "grown_bytes": grown * 1024,
        "mapped_bytes": int(mapped[1]) * 1024 if mapped else 0,
        "block_bytes": block_bytes(world.world_size),
    }


def main(*sizes: str) -> None:
    """Print what the ranks found, a line of JSON for each size."""
    for size in sizes:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
        print(json.dumps({"size": size, "ranks": run_ranks(reduce_much, 2)}))
