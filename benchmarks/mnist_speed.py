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

sys.path.insert(0, str(HERE / "mnist_variants"))
from common import mean_and_quartile

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
                ms, _, accuracy = measured = measure(variant, n, root, args.epochs)
                found[variant, n].append(measured)
                print(
                    f"{repeat + 1}/{args.repeats}  {n} processes  {variant:<12}  {ms:.3f} ms  {accuracy:.2%}",
                    flush=True,
                )
    # On one process the two are so close that a noisy machine hides the difference: more turns, either one first.
    for turn in range(args.pairs if 1 in args.processes else 0):
        for variant in VARIANTS[1:] if turn % 2 else VARIANTS[:0:-1]:
            ms, _, accuracy = measured = measure(variant, 1, root, args.epochs)
            found[variant, 1].append(measured)
            print(f"{turn + 1}/{args.pairs}  1 process    {variant:<12}  {ms:.3f} ms  {accuracy:.2%}", flush=True)
    lines = [line for n in args.processes for line in summary(n, found)]
    write_result("mnist_speed", "MNIST: ms a step, steady state", lines, sys.argv[1:])


def measure(variant, n, root, epochs):
    """Run one variant in processes of its own; give (ms a step, undisturbed ms, accuracy) after the first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        if variant == "instep":
            result = run(instep_command(n, root, epochs, folder))
            by_epoch = epochs_in_log(Path(folder) / "run" / "events" / "rank-0.jsonl")
            accuracy = result["metrics"]["accuracy"]
        else:
            script = HERE / "mnist_variants" / BASELINES[variant]
            result = run([BIN / "torchrun", "--standalone", "--nproc-per-node", n, script, root, epochs])
            by_epoch = list(zip(result["ms_per_step"], result["undisturbed_ms"], strict=True))
            accuracy = result["accuracy"]
    assert len(by_epoch) == epochs
    means, quartiles = zip(*by_epoch[1:], strict=True)
    return statistics.median(means), statistics.median(quartiles), accuracy


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
    """Give (mean, lower quartile) of ms a step for each epoch: from its first step's time to its last one's."""
    times = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            times.setdefault(event["epoch"], []).append(event["time"])
    return [mean_and_quartile(ends) for _, ends in sorted(times.items())]


def summary(n, found):
    """Lay out one number of processes: medians, spreads, and the ratios against the goals."""
    means = {variant: statistics.median(run[0] for run in found[variant, n]) for variant in VARIANTS}
    quartiles = {variant: statistics.median(run[1] for run in found[variant, n]) for variant in VARIANTS}
    rows = []
    for variant in VARIANTS:
        times = [run[0] for run in found[variant, n]]
        accuracy = statistics.median(run[2] for run in found[variant, n])
        spread = f"{min(times):.3f}–{max(times):.3f}"
        rows.append([variant, f"{means[variant]:.3f}", spread, f"{quartiles[variant]:.3f}", f"{accuracy:.2%}"])
    least, most = GOALS.get(n, (None, None))
    ratios = []
    for what, ms in (("mean", means), ("undisturbed", quartiles)):
        faster, overhead = ms["tutorial"] / ms["instep"], ms["instep"] / ms["hand-written"]
        ratios.append(
            [f"tutorial / instep, {what}", f"{faster:.2f}", f">= {least}", verdict(least and faster >= least)]
        )
        ratios.append(
            [f"instep / hand-written, {what}", f"{overhead:.3f}", f"<= {most}", verdict(most and overhead <= most)]
        )
    counts = ", ".join(f"{len(found[variant, n])} ({variant})" for variant in VARIANTS)
    return [
        f"## {n} process{'es' if n > 1 else ''}, medians of {counts} runs",
        "",
        *table(["variant", "mean ms a step", "lowest–highest", "undisturbed ms", "test accuracy"], rows),
        "",
        *table(["ratio", "found", "goal", ""], ratios),
        "",
        "Undisturbed: the lower quartile of single steps. A neighbour on the machine only ever adds time.",
        "",
    ]


def verdict(reached):
    return "no goal" if reached is None else "reached" if reached else "missed"


if __name__ == "__main__":
    main()
