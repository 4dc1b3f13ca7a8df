"""What the variants share: the planted Task, its data loaders, its model, and a stopwatch.

Ranks: all.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent.parent))
from explain_task import Planted

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parse():
    """Return the options, which are those of `instep train` that the plants use, and the Task with its fields."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("tool")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data-workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--comm", default="gloo")
    parser.add_argument("--compile", action="store_true")
    args, fields = parser.parse_known_args()
    types = {field.name: field.type for field in dataclasses.fields(Planted)}
    pairs = (word.split("=") for word in fields)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    return args, Planted(**{name: types[name](value) for name, value in pairs})


def make_loader(task, data, args):
    """Return a loader of this rank's share of each batch; a remainder goes to the last ranks, as instep divides it."""
    share = args.batch_size * (RANK + 1) // WORLD_SIZE - args.batch_size * RANK // WORLD_SIZE
    sampler = DistributedSampler(data, WORLD_SIZE, RANK, shuffle=True)
    return DataLoader(data, share, sampler=sampler, num_workers=args.data_workers, collate_fn=task.collate)


class Stopwatch:
    """Note when each step ends: the clock, and the CPU time of this process."""

    def __init__(self, folder):
        self._folder, self._ends = folder, []

    def step(self):
        self._ends.append((time.perf_counter(), time.process_time()))

    def write(self):
        if RANK == 0:
            (self._folder / "steps.json").write_text(json.dumps(self._ends))
