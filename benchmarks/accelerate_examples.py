"""Accelerate's two introductory examples, and the same as a Task: lines of code, ms a step, accuracy; side by side.

python benchmarks/accelerate_examples.py --repeats 3

`nlp`: a BERT that compares two sentences, with padding to the longest and a linear schedule with warm-up. `cv`: a
convolutional network on pictures that are moved at random, with a one-cycle schedule. The scripts have the form of
Accelerate's nlp_example and cv_example, without their comments, command line and downloads: data, tokenizer and models
are small and made here, and shared by both ways (`accelerate_variants/common.py`). On CPU, two processes, one thread
each. Every measurement is a fresh set of processes; the two ways take turns. The first 20
steps do not count.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import BIN, HERE, table, write_result

sys.path.insert(0, str(HERE / "accelerate_variants"))
from common import BATCH_PER_PROCESS, SEED, step_ms

VARIANTS = HERE / "accelerate_variants"
EXAMPLES = {"nlp": 3, "cv": 4}
"""Their epochs."""
WAYS = ("Accelerate", "instep")
LIMIT_S = 300


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def main():
    args = parse_args()
    runs = {(example, way): [] for example in EXAMPLES for way in WAYS}
    for repeat in range(args.repeats):
        for example, way in runs:
            measured = median, fastest, accuracy = measure(example, way, args.processes)
            runs[example, way].append(measured)
            times = f"{median:.2f} ms, fastest tenth {fastest:.2f}"
            print(f"{repeat + 1}/{args.repeats}  {example}  {way:<10}  {times}  {accuracy:.2%}", flush=True)
    write_result(
        "accelerate_examples",
        f"Accelerate's examples as Tasks, {args.processes} processes",
        [*table(["example", "", "lines of code", "ms a step", "fastest tenth", "accuracy"], rows_of(runs)), *NOTES],
        sys.argv[1:],
    )


NOTES = [
    "",
    "Lines: code of the script, without docstrings, comments, blank lines and the stopwatch. Accuracy: over the",
    "evaluation set, at the end; the two ways draw samples in another order, and other noise.",
]


def rows_of(runs):
    rows = []
    for (example, way), measured in runs.items():
        median, fastest, accuracy = map(statistics.median, zip(*measured, strict=True))
        rows.append((example, way, lines_of(example, way), f"{median:.2f}", f"{fastest:.2f}", f"{accuracy:.1%}"))
    return rows


def file_of(example, way):
    return VARIANTS / f"{example}_{'task' if way == 'instep' else 'accelerate'}.py"


def lines_of(example, way):
    """Count the lines of code."""
    text = re.sub(r'""".*?"""', "", file_of(example, way).read_text(), flags=re.S)
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("#") and "watch" not in line for line in lines)


def measure(example, way, processes):
    """Return the median ms of a step, that of the fastest tenth, and the accuracy at the end."""
    script, epochs = file_of(example, way), str(EXAMPLES[example])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if way == "Accelerate":
        done = _run([BIN / "torchrun", "--standalone", "--nproc-per-node", processes, script, epochs], env)
        return tuple(map(float, re.search(r"RESULT (\S+) (\S+) (\S+)", done.stdout).groups()))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = ["--epochs", epochs, "--batch-size", processes * BATCH_PER_PROCESS, "--seed", SEED, "--threads", 1]
        words = [BIN / "instep", "train", script, "-n", processes, *options, "--run-dir", run_dir, "--json", "--quiet"]
        result = json.loads(_run(words, env).stdout.splitlines()[-1])
        events = map(json.loads, (run_dir / "events" / "rank-0.jsonl").read_text().splitlines())
        ends = [event["time"] for event in events if event["event"] == "step"]
        return *step_ms(ends), result["metrics"]["accuracy"]


def _run(words, env):
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"{words[0]} failed:\n{done.stderr[-3000:]}")
    return done


if __name__ == "__main__":
    main()
