"""ms a step on MNIST: instep, the tutorials' DDP script, the best hand-written loop, and peers; side by side.

python benchmarks/mnist_speed.py --repeats 5

A 784-256-10 MLP, Adam, 64 samples a process, one thread a process, on CPU. The two scripts also run with nothing
changed but the backend's name, instep also over gloo. Peers that are installed (`make bench` installs them) run as
their documentation has it, and tuned as far as they can be: whole batches, fused Adam, denormals flushed, nothing
logged or saved. Every measurement is a fresh set of processes; the variants take turns, so that a slow minute of the
machine is everyone's. Only the second epoch and later ones count. one_process.py measures the difference to the
hand-written loop on 1 process more finely.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import BIN, HERE, ROOT, Bars, loopback_only, table, write_result

sys.path.insert(0, str(HERE / "mnist_variants"))
from common import BATCH_PER_PROCESS, mean_and_quartile

BASELINES = {
    "tutorial": ("tutorial.py", "gloo"),
    "hand-written": ("by_hand.py", "gloo"),
    'tutorial, "instep"': ("tutorial.py", "instep"),
    'hand-written, "instep"': ("by_hand.py", "instep"),
}
PEERS = {
    "Accelerate": ("accelerate", "with_accelerate.py"),
    "Fabric": ("lightning", "with_fabric.py"),
    "Lightning": ("lightning", "with_lightning.py"),
    "Hugging Face Trainer": ("transformers", "with_trainer.py"),
    "Ray Train": ("ray", "with_ray.py"),
}
INSTALLED = [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)]
TUNED = ", tuned"
OURS = {"instep, gloo": "gloo", "instep": "auto"}
RATIOS = [
    ("tutorial", "instep", "at least", {1: 1.9, 2: 3.2}),
    ("instep", "hand-written", "at most", {1: 1.05, 2: 0.45, 4: 1.0}),
    ("instep", "instep, gloo", "at most", {4: 1.0}),
    ("tutorial", 'tutorial, "instep"', None, {}),
    ("hand-written", 'hand-written, "instep"', None, {}),
]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="../shared/data/mnist", help="folder of MNIST's four idx files, gzipped")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    return parser.parse_args()


def main():
    args = parse_args()
    if args.epochs < 2:
        sys.exit("--epochs must be at least 2: the first epoch does not count.")
    root = str((ROOT / args.root).resolve())
    runs = {(variant, n): [] for n in args.processes for variant in variants_of(n)}
    for repeat in range(args.repeats):
        for n in args.processes:
            for variant in variants_of(n):
                ms, _, accuracy = measured = measure(variant, n, root, args.epochs)
                runs[variant, n].append(measured)
                print(
                    f"{repeat + 1}/{args.repeats}  {n} processes  {variant:<28}  {ms:.3f} ms  {accuracy:.2%}",
                    flush=True,
                )
    lines = [line for n in args.processes for line in summary(n, runs)]
    bars = [bars_of(n, runs) for n in args.processes]
    write_result("mnist_speed", "MNIST: ms a step, steady state", lines, sys.argv[1:], bars=bars)


def variants_of(n):
    """One process speaks with nobody."""
    peers = [name + how for name in INSTALLED for how in ("", TUNED)]
    return ["tutorial", "hand-written", *peers, "instep"] if n == 1 else [*BASELINES, *peers, *OURS]


def bars_of(n, runs):
    """Return a picture of one number of processes: who uses nothing of instep, and instep."""
    shown = [name for name in variants_of(n) if '"instep"' not in name and "gloo" not in name]
    values = {name: statistics.median(run[0] for run in runs[name, n]) for name in shown}
    return Bars(f"MNIST on {n} process{'es' if n > 1 else ''} (CPU), time per step", "ms", values)


def measure(variant, n, root, epochs):
    """Run one variant in processes of its own; give (ms a step, undisturbed ms, accuracy) after the first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(command_of(variant, n, root, epochs, folder))
        by_epoch = [mean_and_quartile(ends) for ends in ends_of(variant, result, folder)]
    accuracy = result["metrics"]["accuracy"] if variant in OURS else result["accuracy"]
    assert len(by_epoch) == epochs
    means, quartiles = zip(*by_epoch[1:], strict=True)
    return statistics.median(means), statistics.median(quartiles), accuracy


def command_of(variant, n, root, epochs, folder):
    if variant in BASELINES:
        script, backend = BASELINES[variant]
        script = HERE / "mnist_variants" / script
        return [BIN / "torchrun", "--standalone", "--nproc-per-node", n, script, root, epochs, backend]
    name, tuned, _ = variant.partition(TUNED)
    if name in PEERS:
        script, how = HERE / "mnist_variants" / PEERS[name][1], [tuned.strip(", ")] if tuned else []
        if name == "Ray Train":
            return loopback_only([sys.executable, script, root, epochs, n, *how])
        return [BIN / "torchrun", "--standalone", "--nproc-per-node", n, script, root, epochs, *how]
    command = [BIN / "instep", "train", HERE / "mnist_variants" / "task.py", f"root={root}", "-n", n]
    command += ["--epochs", epochs, "--batch-size", BATCH_PER_PROCESS * n, "--threads", 1, "--comm", OURS[variant]]
    return [*command, "--eval-every", "never", "--save-every", "never", "--run-dir", f"{folder}/run", "--json"]


def run(command):
    """Run a command and read the JSON object on its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ends_of(variant, result, folder):
    """Return the times at which each epoch's steps ended: from what a baseline printed, or from instep's log."""
    if variant not in OURS:
        return result["ends"]
    times = {}
    for line in (Path(folder) / "run" / "events" / "rank-0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            times.setdefault(event["epoch"], []).append(event["time"])
    return [ends for _, ends in sorted(times.items())]


def summary(n, runs):
    """Lay out one number of processes: medians, spreads, and the ratios against the goals."""
    means = {v: statistics.median(run[0] for run in runs[v, n]) for v in variants_of(n)}
    quartiles = {v: statistics.median(run[1] for run in runs[v, n]) for v in variants_of(n)}
    rows = []
    for variant in variants_of(n):
        times = [run[0] for run in runs[variant, n]]
        accuracy = statistics.median(run[2] for run in runs[variant, n])
        spread = f"{min(times):.3f}–{max(times):.3f}"
        rows.append([variant, f"{means[variant]:.3f}", spread, f"{quartiles[variant]:.3f}", f"{accuracy:.2%}"])
    ratios = []
    for above, below, direction, goals in RATIOS:
        if above in means and below in means:
            ratio = means[above] / means[below]
            goal = f"{direction} {goals[n]}" if n in goals else ""
            verdict = ("reached" if (ratio >= goals[n]) == (direction == "at least") else "missed") if goal else ""
            quiet = f"{quartiles[above] / quartiles[below]:.2f}"
            ratios.append([f"{above} / {below}", f"{ratio:.2f}", goal, verdict, quiet])
    return [
        f"## {n} process{'es' if n > 1 else ''}, medians of {len(runs['instep', n])} runs each",
        "",
        *table(["variant", "mean ms a step", "lowest–highest", "undisturbed ms", "test accuracy"], rows),
        "",
        *table(["ratio", "by means", "goal", "", "undisturbed"], ratios),
        "",
        "Undisturbed: the lower quartile of single steps. A neighbour on the machine only ever adds time.",
        "",
    ]


if __name__ == "__main__":
    main()
