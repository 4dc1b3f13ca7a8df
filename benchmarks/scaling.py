"""How much of a second core is won: compute-bound training on 1 and 2 single-threaded processes, in turns.

python benchmarks/scaling.py

The batch a process stays the same, so a perfect second process leaves the time of a step as it was: efficiency is
ms a step on 1 process / ms a step on 2. "two alone" are two trainings that do not speak with each other, at the
same time, and the slower one of each step counts: what is left when an exchange takes no time at all, and each still
waits for the other. All take turns of some seconds (turns.py). Each net is measured with two batches: the gradients
stay the same, so the larger has four times the work for the same exchange.
"""

import argparse
import statistics
import sys
from functools import partial

from machine import BIN, HERE, table, write_result
from turns import ratios, step_times

BATCHES = {"conv": (32, 128), "transformer": (16, 64)}
WAYS = ("1 process", "2, shared memory", "2, gloo", "two alone")
GOAL = 0.95


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turn", type=float, default=3.0, help="seconds, with the smaller batch")
    args = parser.parse_args()
    lines = []
    for kind, batches in BATCHES.items():
        for batch in batches:
            turn = args.turn * batch / batches[0]
            ways = {way: partial(commands, kind, batch, way) for way in WAYS}
            lines += summary(kind, batch, step_times(ways, args.rounds, turn))
            print("\n".join(lines), flush=True)
    write_result("scaling", "Scaling from 1 to 2 processes", lines, sys.argv[1:])


def commands(kind, batch, way, folder):
    comm = "gloo" if "gloo" in way else "auto"
    if way == "two alone":
        return [command(kind, batch, 1, comm, folder / str(number)) for number in range(2)]
    return [command(kind, batch, 2 if way.startswith("2") else 1, comm, folder)]


def command(kind, batch, n, comm, run_dir):
    words = [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", n, "--steps", 10**6),
        *("--batch-size", n * batch, "--threads", 1, "--comm", comm, "--save-every", "never"),
        *("--run-dir", run_dir, "--quiet", "--json"),
    ]
    return words, run_dir


def summary(kind, batch, times):
    rows = []
    for way in WAYS:
        efficiencies = sorted(ratios(times, "1 process", way))
        if not efficiencies:
            sys.exit(f"{kind}, batch of {batch}, {way}: no turn held a whole step: give a longer --turn")
        efficiency = statistics.median(efficiencies)
        low, high = efficiencies[len(efficiencies) // 4], efficiencies[-1 - len(efficiencies) // 4]
        verdict = f">= {GOAL}: {'reached' if efficiency >= GOAL else 'missed'}" if way == "2, shared memory" else ""
        ms = statistics.median(step for turn in times[way] for step in turn)
        rows.append([way, f"{ms:.1f}", f"{efficiency:.3f} ({low:.2f}–{high:.2f})" if way != WAYS[0] else "", verdict])
    return [
        f"## {kind}, batch of {batch} a process, {len(times[WAYS[0]])} turns each",
        "",
        *table(["processes", "median ms a step", "efficiency by turns: median (quartiles)", "goal"], rows),
        "",
    ]


if __name__ == "__main__":
    main()
