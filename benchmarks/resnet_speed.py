"""ResNet-50 where images have to be read: instep at its defaults, and a compiled plain loop with 8 loader processes.

python benchmarks/resnet_speed.py [--kinds batches samples 2 20]

bf16, 224 x 224 images as bytes, batch 256. Kinds of datasets: with `__getitems__`, without, and those where a sample
takes 2 or 20 ms of waiting. Every measurement is a fresh process; the ways take turns; medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import BIN, HERE, Bars, table, write_result
from turns import ends_of

VARIANTS = HERE / "resnet_variants"
WORKERS = 8
GOAL = 1.0
NAMES = {"batches": "with __getitems__", "samples": "without", "2": "2 ms a sample", "20": "20 ms a sample"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=60, help="steps that do not count: instep measures in them")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rows, bars = [], []
    for kind in args.kinds:
        times = {"plain loop": [], "instep": []}
        for _ in range(args.repeats):
            times["plain loop"].append(plain(kind, args))
            ms, reading = with_instep(kind, args)
            times["instep"].append(ms)
        middle = {way: statistics.median(values) for way, values in times.items()}
        speed = {way: 1000 * args.batch_size / ms for way, ms in middle.items()}
        ratio = speed["instep"] / speed["plain loop"]
        verdict = "reached" if ratio >= GOAL else "missed"
        images = [f"{speed[way]:.0f}" for way in times]
        rows.append([NAMES[kind], *images, reading, f"{ratio:.3f}", verdict])
        bars.append(Bars(f"ResNet-50, dataset {NAMES[kind]}", "images/s", speed, better="more"))
        print(*rows[-1], sep="  ", flush=True)
        write(args, rows, bars)  # each kind takes minutes


def write(args, rows, bars):
    header = ["dataset", f"plain loop, {WORKERS} workers", "instep", "instep chose", "instep / plain", f"≥ {GOAL}"]
    lines = [*table(header, rows), "", f"Images a second, medians of {args.repeats} runs each."]
    write_result("resnet_speed", "ResNet-50 on one GPU: images a second", lines, sys.argv[1:], bars=bars)


def plain(kind, args):
    words = [sys.executable, VARIANTS / "plain.py", kind, args.batch_size, WORKERS, args.warm_up, args.steps]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=VARIANTS)
    if done.returncode:
        sys.exit(f"plain, {kind}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms"]


def with_instep(kind, args):
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [BIN / "instep", "train", VARIANTS / "task.py", f"kind={kind}", "--batch-size", args.batch_size]
        words += ["--steps", args.warm_up + args.steps, "--drop-last", "--save-every", "never"]
        words += ["--precision", "bf16", "--run-dir", run_dir, "--json"]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"instep, {kind}: {done.stderr[-3000:]}")
        ends = ends_of(run_dir)
        events = map(json.loads, (run_dir / "events" / "rank-0.jsonl").read_text().splitlines())
        reading = [event["reading"] for event in events if event["event"] in ("plan", "input")][-1]
        return 1000 * (ends[-1] - ends[args.warm_up - 1]) / args.steps, reading.rpartition(", ")[2]


if __name__ == "__main__":
    main()
