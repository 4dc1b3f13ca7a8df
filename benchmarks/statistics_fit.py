"""Fitting scalers: on 1 and on 2 processes, and scikit-learn, in turns.

python benchmarks/statistics_fit.py           a minute
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from machine import HERE, ROOT, table, write_result

GOAL = 1.7


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main():
    args = parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        data = random.normal(3.0, 2.0, (args.rows, args.columns))
        np.save(Path(folder) / "float64.npy", data)
        np.save(Path(folder) / "float32.npy", data.astype(np.float32))
        times = measure(folder, args.rounds)
    rows = []
    for name, ways in times.items():
        one, two, theirs = (ways[way] for way in ("1 process", "2 processes", "scikit-learn"))
        speedups = [[a[kind] / b[kind] for a, b in zip(one, two, strict=True)] for kind in (0, 1)]
        medians = [f"{statistics.median(wall for wall, _ in each):.3f}" for each in (one, two, theirs)]
        rows.append([name, *medians, *(f"{statistics.median(each):.2f}" for each in speedups)])
    header = ["scaler, data", "1 process, s", "2 processes, s", "scikit-learn, s", "times as fast", "by CPU time"]
    lines = [*table(header, rows), "", note(args, load)]
    write_result("statistics_fit", "Fitting scalers on 1 and 2 processes", lines, sys.argv[1:])


def note(args, load):
    return (
        f"{args.rows} rows of {args.columns} columns from a memory map in the page cache, one thread a process, median "
        f"of {args.rounds} rounds; in each round all take turns. By CPU time: of the one process, over that of the "
        "busier one of two, which other work on the machine changes little. "
        f"Goal: {GOAL} times as fast on 2 processes as on 1. Load average before the measurement: {load:.2f}."
    )


def measure(folder, rounds):
    script = HERE / "statistics_ranks.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29731"]
    done = subprocess.run([*run, str(script), folder, str(rounds)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
