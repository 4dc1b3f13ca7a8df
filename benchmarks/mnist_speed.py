"""ms a step on MNIST: instep, the tutorials' DDP script, the best hand-written loop; side by side.

python benchmarks/mnist_speed.py --repeats 5

A 784-256-10 MLP, Adam, 64 samples a process, one thread a process, gloo. Every measurement is a fresh set of
processes; the variants take turns, so that a slow minute of the machine is everyone's. Only the second epoch
and later ones count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import BIN, HERE, ROOT, table, write_result

VARIANTS = ("tutorial", "hand-written", "instep")
GOALS = {1: (1.9, 1.05), 2: (1.3, 1.05)}
BASELINES = {"tutorial": "tutorial.py", "hand-written": "by_hand.py"}
BATCH_PER_PROCESS = 64


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="../shared/data/mnist", help="folder of MNIST's four idx files, gzipped")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--pairs", type=int, default=8, help="further turns of instep and the hand-written loop on 1 process"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    if args.epochs < 2:
        sys.exit("--epochs must be at least 2: the first epoch does not count.")
    root = str((ROOT / args.root).resolve())
    found = {(variant, n): [] for n in args.processes for variant in VARIANTS}
    for repeat in range(args.repeats):
        for n in args.processes:
            for variant in VARIANTS:
                ms, accuracy = measure(variant, n, root, args.epochs)
                found[variant, n].append((ms, accuracy))
                print(
                    f"{repeat + 1}/{args.repeats}  {n} processes  {variant:<12}  {ms:.3f} ms  {accuracy:.2%}",
                    flush=True,
                )
    # On one process the two are so close that a noisy machine hides the difference: more turns, either one first.
    for turn in range(args.pairs if 1 in args.processes else 0):
        for variant in VARIANTS[1:] if turn % 2 else VARIANTS[:0:-1]:
            ms, accuracy = measure(variant, 1, root, args.epochs)
            found[variant, 1].append((ms, accuracy))
            print(f"{turn + 1}/{args.pairs}  1 process    {variant:<12}  {ms:.3f} ms  {accuracy:.2%}", flush=True)
    lines = [line for n in args.processes for line in summary(n, found)]
    write_result("mnist_speed", "MNIST: ms a step, steady state", lines, sys.argv[1:])


def measure(variant, n, root, epochs):
    """Run one variant in processes of its own; give its ms a step after the first epoch, and its accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        if variant == "instep":
            result = run(instep_command(n, root, epochs, folder))
            by_epoch = epochs_in_log(Path(folder) / "run" / "events" / "rank-0.jsonl")
            accuracy = result["metrics"]["accuracy"]
        else:
            script = HERE / "mnist_variants" / BASELINES[variant]
            result = run([BIN / "torchrun", "--standalone", "--nproc-per-node", n, script, root, epochs])
            by_epoch, accuracy = result["ms_per_step"], result["accuracy"]
    assert len(by_epoch) == epochs
    return statistics.median(by_epoch[1:]), accuracy


def instep_command(n, root, epochs, folder):
    command = [BIN / "instep", "train", HERE / "mnist_variants" / "task.py", f"root={root}", "-n", n]
    command += ["--epochs", epochs, "--batch-size", BATCH_PER_PROCESS * n, "--threads", 1]
    return [*command, "--eval-every", "never", "--save-every", "never", "--run-dir", f"{folder}/run", "--json"]


def run(command):
    """Run a command and read the JSON object on its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def epochs_in_log(path):
    """Give ms a step for each epoch: from its first step's time to its last one's."""
    times = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            times.setdefault(event["epoch"], []).append(event["time"])
    return [1000 * (ends[-1] - ends[0]) / (len(ends) - 1) for _, ends in sorted(times.items())]


def summary(n, found):
    """Lay out one number of processes: medians, spreads, and the ratios against the goals."""
    medians = {variant: statistics.median(ms for ms, _ in found[variant, n]) for variant in VARIANTS}
    rows = []
    for variant in VARIANTS:
        times = [ms for ms, _ in found[variant, n]]
        accuracy = statistics.median(a for _, a in found[variant, n])
        rows.append([variant, f"{medians[variant]:.3f}", f"{min(times):.3f}–{max(times):.3f}", f"{accuracy:.2%}"])
    faster, overhead = medians["tutorial"] / medians["instep"], medians["instep"] / medians["hand-written"]
    least, most = GOALS.get(n, (None, None))
    ratios = [["tutorial / instep", f"{faster:.2f}", f">= {least}", verdict(least and faster >= least)]]
    ratios += [["instep / hand-written", f"{overhead:.3f}", f"<= {most}", verdict(most and overhead <= most)]]
    return [
        f"## {n} process{'es' if n > 1 else ''}, medians of {', '.join(f'{len(found[v, n])} ({v})' for v in VARIANTS)}",
        "",
        *table(["variant", "ms a step", "lowest–highest", "test accuracy"], rows),
        "",
        *table(["ratio", "found", "goal", ""], ratios),
        "",
    ]


def verdict(reached):
    return "no goal" if reached is None else "reached" if reached else "missed"


if __name__ == "__main__":
    main()
