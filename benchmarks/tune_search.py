"""A search of 2 parameters on MNIST: instep, Optuna around a DDP training by hand, and Ray Tune, in turns.

python benchmarks/tune_search.py [--trials 12] [--rounds 2]         about five minutes a round

All have the same budget (trials and epochs), Optuna's TPE sampler with one seed and successive halving with a factor of
3. The target is what all of them have reached in the end: how long until an evaluation was at least as good. Ray Tune's
trials have one process each, two at once, which is how it uses two cores; instep is measured so as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import BIN, HERE, ROOT, Bars, loopback_only, table, write_result

VARIANTS = HERE / "tune_variants"
OURS = {
    "instep, 2 processes a trial": ["-n", "2"],
    "instep, 1 process a trial, 2 trials at once": ["-n", "1", "--parallel", "2", "--threads", "1"],
    "instep, 1 process a trial, one after the other": ["-n", "1", "--threads", "1"],
}
THEIRS = {
    "Optuna and DDP by hand, 2 processes a trial": "with_optuna.py",
    "Ray Tune, 1 process a trial, 2 trials at once": "with_ray.py",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="../shared/data/mnist", help="folder of MNIST's four idx files, gzipped")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    root = str((ROOT / args.root).resolve())
    runs = {name: [] for name in (*OURS, *THEIRS)}
    for number in range(args.rounds):
        for name in runs:
            runs[name].append(measure(name, root, args))
            print(f"round {number + 1}  {name}: {runs[name][-1][0]:.1f} s", flush=True)
    target = min(max(accuracy for _, accuracy in notes) for each in runs.values() for _, notes in each)
    rows, values = [], {}
    for name, each in runs.items():
        totals = [total for total, _ in each]
        reached = [min(when for when, accuracy in notes if accuracy >= target) for _, notes in each]
        epochs = [len(notes) for _, notes in each]
        best = [max(accuracy for _, accuracy in notes) for _, notes in each]
        values[name] = statistics.median(reached)
        rows.append([name, *map(spread, (reached, totals)), in_words(epochs), f"{100 * statistics.median(best):.2f} %"])
    header = ["", f"s until {100 * target:.2f} % were reached", "s of the whole search", "epochs trained", "best"]
    lines = [*table(header, rows), "", note(args)]
    bars = [Bars(f"A search on MNIST: time until {100 * target:.2f} % accuracy", "s", values)]
    write_result("tune_search", "Searching two parameters: instep and its peers", lines, sys.argv[1:], bars=bars)


def note(args):
    return (
        f"{args.trials} trials of at most {args.epochs} epochs over 60,000 images, batches of 128, evaluated after "
        f"each epoch; {args.rounds} rounds in turns: the median, and all values. From the start of the command on, "
        "with imports."
    )


def spread(values):
    return f"**{statistics.median(values):.1f}** ({', '.join(f'{value:.1f}' for value in values)})"


def in_words(counts):
    return ", ".join(map(str, counts))


def measure(name, root, args):
    """Run a search; return how long it took, and when which accuracy was reached, in seconds since its start."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        if name in OURS:
            words = [f"root={root}", "lr=1e-5..1e-1:log", "hidden=64,128,256", "--trials", args.trials]
            words += ["--metric", "accuracy:max", "--pruner", "successivehalving:reduction_factor=3", "--seed", 0]
            words += ["--epochs", args.epochs, "--batch-size", 128, "--save-every", "never", "--run-dir", f"{folder}/s"]
            run([BIN / "instep", "tune", VARIANTS / "task.py", *words, *OURS[name], "--quiet"])
            events = [
                event for path in Path(folder, "s", "trials").glob("*/events/rank-0.jsonl") for event in read(path)
            ]
            notes = [(event["time"], event["accuracy"]) for event in map(flat, events) if event["event"] == "eval"]
        else:
            words = [sys.executable, VARIANTS / THEIRS[name], root, args.trials, args.epochs, f"{folder}/notes"]
            run(loopback_only(list(map(str, words))))
            notes = [(event["time"], event["accuracy"]) for event in read(Path(folder, "notes"))]
        total = time.time() - begun
    return total, [(when - begun, accuracy) for when, accuracy in notes]


def run(words):
    paths = os.pathsep.join([str(VARIANTS), str(HERE / "mnist_variants")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "1"}
    done = subprocess.run(list(map(str, words)), env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def flat(event):
    return {**event, **event.get("metrics", {})}


if __name__ == "__main__":
    main()
