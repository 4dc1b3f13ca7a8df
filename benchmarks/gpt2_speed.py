"""GPT-2 small on one GPU: tokens a second of instep at its defaults, of plain loops, Accelerate and Lightning.

python benchmarks/gpt2_speed.py

124 million parameters, context 1024, batch 32. Every variant is a process of its own, and they take turns; medians.
TFLOP/s counts 6 operations a parameter and token, and 12 * layers * width * context a token for attention.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from machine import BIN, HERE, table, write_result
from turns import ends_of

VARIANTS = HERE / "gpt2_variants"
BATCH, LENGTH = 32, 1024
WARM_UP, STEPS = 20, 60
OPERATIONS = (6 * 124.4e6 + 12 * 12 * 768 * LENGTH) * BATCH * LENGTH
WAYS = {
    "plain, fp32": ("plain.py", "fp32"),
    "plain, eager": ("plain.py", "eager"),
    "plain, compiled model, fused": ("plain.py", "model"),
    "plain, compiled with its loss, fused": ("plain.py", "loss"),
    "Accelerate": ("with_accelerate.py", "default"),
    "Accelerate, compiled": ("with_accelerate.py", "compiled"),
    "Lightning": ("with_lightning.py", "default"),
    "Lightning, compiled": ("with_lightning.py", "compiled"),
    "instep": ("task.py",),
}
GOALS = [
    ("instep", "Accelerate", 1.35),
    ("instep", "Lightning", 1.35),
    ("instep", "plain, compiled model, fused", 1.0),
    ("instep", "plain, compiled with its loss, fused", 1.0),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("options", nargs="*", help="more options of instep train, behind --")
    args = parser.parse_args()
    results = {way: [] for way in args.only}
    for _ in range(args.repeats):
        for way in args.only:
            results[way].append(measure(way, args.options))
            print(f"{way:40s} {results[way][-1]}", flush=True)
    peers = ", ".join(f"{package} {version(package)}" for package in ("accelerate", "lightning"))
    lines = [f"- peers: {peers}", "", *summary(results)]
    write_result("gpt2_speed", "GPT-2 small on one GPU", lines, sys.argv[1:])


def measure(way, options):
    file, *words = WAYS[way]
    if way == "instep":
        return measure_instep(options)
    done = subprocess.run([sys.executable, VARIANTS / file, *words], capture_output=True, text=True, cwd=VARIANTS)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr[-3000:]}")
    return json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{")))


def measure_instep(options):
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [BIN / "instep", "train", VARIANTS / "task.py", "--batch-size", BATCH, "--steps", WARM_UP + STEPS]
        command += ["--run-dir", run_dir, "--save-every", "never", "--json", *options]
        env = {**os.environ, "PEAK_MEMORY": folder}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(f"instep: {done.stderr[-3000:]}")
        ends = ends_of(run_dir)
        ms = 1000 * (ends[-1] - ends[WARM_UP - 1]) / STEPS
        peak = max(json.loads(path.read_text()) for path in Path(folder).glob("peak-*"))
        return {"ms": ms, "loss": json.loads(done.stdout.splitlines()[-1])["loss"], "gib": peak}


def summary(results_by_way):
    rows, speed = [], {}
    for way, results in results_by_way.items():
        ms = [each["ms"] for each in results]
        middle = statistics.median(ms)
        speed[way] = BATCH * LENGTH / middle
        memory = statistics.median([each.get("gib", float("nan")) for each in results])
        times = f"{middle:.1f} ({min(ms):.1f}–{max(ms):.1f})"
        teraflops = f"{OPERATIONS / middle / 1e9:.0f}"
        rows.append([way, times, f"{speed[way]:.0f}", teraflops, f"{memory:.1f}", f"{results[-1]['loss']:.3f}"])
    goals = []
    for one, other, goal in GOALS:
        if one in speed and other in speed:
            ratio = speed[one] / speed[other]
            goals.append([f"{one} / {other}", f"{ratio:.3f}", f">= {goal}", "reached" if ratio >= goal else "missed"])
    return [
        *table(["variant", "ms a step (lowest–highest)", "k tokens/s", "TFLOP/s", "GiB", "loss"], rows),
        "",
        *table(["ratio of speeds", "found", "goal", ""], goals),
    ]


if __name__ == "__main__":
    main()
