"""What exact mode costs: training on 2 processes with and without it, in turns.

python benchmarks/exact_cost.py

With 16 shards each of two ranks makes 8 forward and backward passes a step. "as many passes" is the same training
without exact mode, accumulated so that it makes as many of the same size: what is left between the two is
the price of exactness itself, the rest is the price of small passes.
"""

import argparse
import statistics
import sys
from functools import partial

from machine import BIN, HERE, table, write_result
from turns import ratios, step_times

SHARDS = 16
BATCH = {"transformer": 64, "conv": 128, "mlp": 128}
GOAL = {"transformer": 1.15, "conv": 1.15}
WAYS = {"plain": (), "as many passes": ("--accumulate", SHARDS // 2), "exact": ("--exact", "--shards", SHARDS)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn", type=float, default=5.0, help="seconds")
    parser.add_argument("--comm", default="gloo")
    args = parser.parse_args()
    lines = []
    for kind in BATCH:
        ways = {way: partial(commands, kind, way, args.comm) for way in WAYS}
        lines += summary(kind, step_times(ways, args.rounds, args.turn), args.comm)
        print("\n".join(lines[-8:]), flush=True)
    write_result("exact_cost", "Exact mode: ms a step on 2 processes", lines, sys.argv[1:])


def commands(kind, way, comm, run_dir):
    words = [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", 2, "--steps", 10**6),
        *("--batch-size", BATCH[kind], "--threads", 1, "--comm", comm, "--save-every", "never"),
        *("--run-dir", run_dir, "--quiet", "--json", *WAYS[way]),
    ]
    return [(words, run_dir)]


def summary(kind, times, comm):
    rows = []
    for way in WAYS:
        ms = statistics.median(step for turn in times[way] for step in turn)
        cells = [f"{statistics.median(ratios(times, 'exact', other)):.2f}" for other in ("plain", "as many passes")]
        reached = "" if kind not in GOAL or way != "exact" else verdict(times, GOAL[kind])
        rows.append([way, f"{ms:.2f}", *(cells if way == "exact" else ["", ""]), reached])
    header = ["way", "median ms a step", "/ plain", "/ as many passes", "goal"]
    title = f"## {kind}, batch of {BATCH[kind]}, {SHARDS} shards, over {comm}, {len(times['exact'])} turns each"
    return [title, "", *table(header, rows), ""]


def verdict(times, goal):
    found = statistics.median(ratios(times, "exact", "as many passes"))
    return f"<= {goal} of as many passes: {'reached' if found <= goal else 'missed'}"


if __name__ == "__main__":
    main()
