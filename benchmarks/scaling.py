"""How much of a second core is won: compute-bound training on 1 and 2 single-threaded processes, side by side.

python benchmarks/scaling.py

The batch a process stays the same, so a perfect second process leaves the time of a step as it was: efficiency is
ms a step on 1 process / ms a step on 2. "two alone" are two trainings that do not speak with each other, at the
same time: what the machine itself leaves of the second core.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile

from machine import BIN, HERE, table, write_result
from mnist_speed import ends_of, run

BATCH = {"conv": 32, "transformer": 16}
WAYS = ("1 process", "2, shared memory", "2, gloo", "two alone")
GOAL = 0.95


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    lines = []
    for kind in BATCH:
        found = {way: [] for way in WAYS}
        for repeat in range(args.repeats):
            for way in WAYS:
                found[way].append(measure(kind, way, args.steps))
                print(f"{kind}  {repeat + 1}/{args.repeats}  {way:<18} {found[way][-1]:.2f} ms", flush=True)
        lines += summary(kind, found)
    write_result("scaling", "Scaling from 1 to 2 processes", lines, sys.argv[1:])


def measure(kind, way, steps):
    """Give the median ms of a step, the first few not counted."""
    n = 2 if way.startswith("2") else 1
    comm = "gloo" if "gloo" in way else "auto"
    with tempfile.TemporaryDirectory() as folder:
        other = None
        if way == "two alone":  # twice as many steps: it must not end first
            other = subprocess.Popen(list(map(str, command(kind, 1, "auto", 2 * steps, f"{folder}/other"))))
        run(command(kind, n, comm, steps, f"{folder}/run"))
        if other is not None:
            other.terminate()
            other.wait()
        ends = [end for epoch in ends_of("instep", None, folder) for end in epoch]
    return statistics.median([1000 * (b - a) for a, b in itertools.pairwise(ends)][4:])


def command(kind, n, comm, steps, run_dir):
    return [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", n, "--steps", steps),
        *("--batch-size", n * BATCH[kind], "--threads", 1, "--comm", comm, "--save-every", "never"),
        *("--run-dir", run_dir, "--quiet", "--json"),
    ]


def summary(kind, found):
    ms = {way: statistics.median(times) for way, times in found.items()}
    rows = []
    for way in WAYS:
        ratios = sorted(one / other for one, other in zip(found["1 process"], found[way], strict=True))
        efficiency = statistics.median(ratios)
        verdict = f">= {GOAL}: {'reached' if efficiency >= GOAL else 'missed'}" if way == "2, shared memory" else ""
        shown = f"{efficiency:.3f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
        rows.append([way, f"{ms[way]:.2f}", shown if way != "1 process" else "", verdict])
    return [
        f"## {kind}, batch of {BATCH[kind]} a process, medians of {len(found['1 process'])} runs",
        "",
        *table(["processes", "ms a step", "efficiency (lowest–highest)", "goal"], rows),
        "",
    ]


if __name__ == "__main__":
    main()
