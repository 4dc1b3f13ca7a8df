"""What exact mode costs: training with and without it, in turns; on 2 processes, or on one with a GPU.

python benchmarks/exact_cost.py
python benchmarks/exact_cost.py --kinds gpt2 -n 1 --without-plain --name exact_cost_gpu

With 16 shards each of two ranks makes 8 forward and backward passes a step, one alone makes 16.
"as many passes" is the same training without exact mode, accumulated so that it makes as many of the same size: what is
left between the two is the price of exactness itself, the rest is the price of small passes.
"""

import argparse
import statistics
import sys
from functools import partial

from machine import BIN, HERE, table, write_result
from turns import ratios, step_times

SHARDS = 16
BATCH = {"transformer": 64, "conv": 128, "mlp": 128, "gpt2": 256}
GOAL = {"transformer": 1.15, "conv": 1.15, "gpt2": 1.10}
WAYS = ("plain", "as many passes", "exact")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn", type=float, default=5.0, help="seconds")
    parser.add_argument("--comm", default="gloo")
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("--without-plain", action="store_true", help="where a whole batch in one pass does not fit")
    parser.add_argument("--batch", type=int, help="instead of the kind's own")
    parser.add_argument("--kinds", default="transformer,conv,mlp")
    parser.add_argument("--name", default="exact_cost", help="of the file with the results")
    args = parser.parse_args()
    if args.batch:
        BATCH.update(dict.fromkeys(BATCH, args.batch))
    lines = []
    for kind in args.kinds.split(","):
        ways = {way: partial(commands, kind, way, args) for way in WAYS[args.without_plain :]}
        lines += summary(kind, step_times(ways, args.rounds, args.turn), args.comm)
        print("\n".join(lines[-8:]), flush=True)
    write_result("exact_cost", f"Exact mode: ms a step, -n {args.processes}", lines, sys.argv[1:], args.name)


def commands(kind, way, args, run_dir):
    how = {
        "plain": (),
        "as many passes": ("--accumulate", SHARDS // args.processes),
        "exact": ("--exact", "--shards", SHARDS),
    }[way]
    words = [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", args.processes, "--steps", 10**6),
        *("--batch-size", BATCH[kind], "--threads", 1, "--comm", args.comm, "--save-every", "never"),
        *("--run-dir", run_dir, "--quiet", "--json", *how),
    ]
    return [(words, run_dir)]


def summary(kind, times, comm):
    rows = []
    for way in times:
        ms = statistics.median(step for turn in times[way] for step in turn)
        cells = [ratio(times, other) for other in WAYS[:2]]
        reached = "" if kind not in GOAL or way != "exact" else verdict(times, GOAL[kind])
        rows.append([way, f"{ms:.2f}", *(cells if way == "exact" else ["", ""]), reached])
    header = ["way", "median ms a step", "/ plain", "/ as many passes", "goal"]
    title = f"## {kind}, batch of {BATCH[kind]}, {SHARDS} shards, over {comm}, {len(times['exact'])} turns each"
    return [title, "", *table(header, rows), ""]


def ratio(times, other):
    return f"{statistics.median(ratios(times, 'exact', other)):.2f}" if other in times else "-"


def verdict(times, goal):
    middle = statistics.median(ratios(times, "exact", "as many passes"))
    return f"<= {goal} of as many passes: {'reached' if middle <= goal else 'missed'}"


if __name__ == "__main__":
    main()
