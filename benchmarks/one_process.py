"""ms a step on one process: instep against the best hand-written loop, in turns of a quarter of a second.

python benchmarks/one_process.py --pairs 6

The two differ by a few hundredths, and a shared machine is half as slow again for seconds at a time: whole runs
one after the other measure the neighbours. So both run at once, on one core, and all but one of the two is
stopped (SIGSTOP) at any time. Both meet the same minutes; a step in which a turn ends counts for nobody.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path

from machine import ROOT, table, write_result
from mnist_speed import command_of, ends_of

GOAL = 1.05
TURN_S = 0.25


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="../shared/data/mnist", help="folder of MNIST's four idx files, gzipped")
    parser.add_argument("--pairs", type=int, default=6, help="of instep and the hand-written loop")
    parser.add_argument("--controls", type=int, default=4, help="pairs of the hand-written loop and itself")
    parser.add_argument("--epochs", type=int, default=9)
    args = parser.parse_args()
    root = str((ROOT / args.root).resolve())
    lines = []
    for variant, count in (("instep", args.pairs), ("hand-written", args.controls)):
        rows, ratios = [], []
        for number in range(count):
            ours, theirs = measure((variant, "hand-written"), root, args.epochs, first=number % 2)
            means, middles = (statistics.fmean(ours), statistics.fmean(theirs)), map(statistics.median, (ours, theirs))
            ratios.append(means[0] / means[1])
            row = [f"{means[1]:.3f}", f"{means[0]:.3f}", f"{ratios[-1]:.3f}", f"{truediv(*middles):.3f}"]
            rows.append([number + 1, *row, f"{len(theirs)} / {len(ours)}"])
            print(variant, *rows[-1], sep="  ", flush=True)
        if ratios:
            lines += report(variant, rows, statistics.median(ratios))
    write_result("one_process", "MNIST on one process: ms a step, in turns", lines, sys.argv[1:])


def report(variant, rows, ratio):
    if variant == "instep":
        verdict = f"goal <= {GOAL}: {'reached' if ratio <= GOAL else 'missed'}"
    else:
        verdict = "the control: how far two processes of the same script are apart by luck"
    header = ["pair", "hand-written, mean ms", f"{variant}, mean ms", "ratio", "of median steps", "steps counted"]
    return [
        f"## {variant} / hand-written",
        "",
        *table(header, rows),
        "",
        f"Median ratio of means over {len(rows)} pairs: **{ratio:.3f}** ({verdict}).",
        "",
    ]


def measure(variants, root, epochs, first):
    """Run two variants side by side in turns; give each one's step times in ms, after its first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(i) for i in range(len(variants))]
        jobs = {}
        for i in (first, 1 - first):
            jobs[i] = start(command_of(variants[i], 1, root, epochs, folders[i]), folders[i].with_suffix(".out"))
        switches = take_turns(list(jobs.values()))
        results = [json.loads(folder.with_suffix(".out").read_text().splitlines()[-1]) for folder in folders]
        ends = [ends_of(*given) for given in zip(variants, results, folders, strict=True)]
    return [[ms for epoch in one[1:] for ms in between(epoch, switches)] for one in ends]


def start(command, out):
    # Both on one core: they never run at the same time, and so neither has the better one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *map(str, command)]
    with out.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT)


def take_turns(jobs):
    """Stop all workers but one, each in turn, until the first one ends; give the times of the switches."""
    workers = [worker_of(job.pid) for job in jobs]
    switches = [time.time()]
    for turn in itertools.count():
        for i, worker in enumerate(workers):
            send(worker, signal.SIGCONT if i == turn % len(workers) else signal.SIGSTOP)
        switches.append(time.time())
        time.sleep(TURN_S)
        if not all(map(is_running, workers)):
            break
    switches.append(time.time())
    for worker in workers:
        send(worker, signal.SIGCONT)
    for job in jobs:
        if job.wait():
            sys.exit(f"{job.args} ended with {job.returncode}")
    return switches


def send(pid, number):
    with contextlib.suppress(ProcessLookupError):  # it may end at any moment
        os.kill(pid, number)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def worker_of(pid):
    """Find the descendant that trains: the one that has computed more than any other, and more than imports take."""
    while True:
        seconds = {child: cpu_seconds(child) for child in descendants(pid)}
        busiest = max(seconds, key=seconds.__getitem__, default=None)
        if busiest and seconds[busiest] > 4:
            return busiest
        time.sleep(0.05)


def descendants(pid):
    try:
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return children + [d for child in children for d in descendants(child)]


def cpu_seconds(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def between(ends, switches):
    """Return the times of the steps within a turn, in ms."""
    first, last = switches[0], switches[-1]
    cut = set()
    for switch in switches:
        cut.add(sum(end < switch for end in ends))
    steps = [(i + 1, a, b) for i, (a, b) in enumerate(itertools.pairwise(ends))]
    return [1000 * (b - a) for i, a, b in steps if i not in cut and a > first and b < last]


if __name__ == "__main__":
    main()
