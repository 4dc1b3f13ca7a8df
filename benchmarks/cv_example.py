"""An image classifier with Accelerate, as its cv_example is written, and as a Task: lines, and ms a step, in turns.

python benchmarks/cv_example.py --rounds 3

ResNet-50 on made-up images of 32x32, a global batch of 16. The variants run one after the other, several times.
"""

import argparse
import ast
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import BIN, HERE, table, write_result

from instep.events.read import read_events

VARIANTS = HERE / "cv_variants"
FILES = {"Accelerate": VARIANTS / "with_accelerate.py", "instep": VARIANTS / "task.py"}
SKIPPED = 3  # the first steps of an epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows = []
    for processes in args.processes:
        taken = {name: [] for name in FILES}
        for number, name in itertools.product(range(args.rounds), FILES):
            taken[name].append(measure(name, processes))
            print(processes, number, name, f"{taken[name][-1]:.1f} ms", flush=True)
        ours, theirs = (statistics.median(taken[name]) for name in ("instep", "Accelerate"))
        rows.append([processes, f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"])
    counts = [f"{name}: {count_lines(path)}" for name, path in FILES.items()]
    lines = [
        f"Lines of code, without imports, comments, docstrings and what measures: {', '.join(counts)}.",
        "",
        *table(["processes", "Accelerate, ms a step", "instep, ms a step", "ratio"], rows),
        "",
        f"Medians of {args.rounds} runs each, one after the other in turn; of a run the median step.",
    ]
    write_result("cv_example", "An image classifier beside Accelerate's cv_example", lines, sys.argv[1:])


def measure(name, processes):
    """Run a variant; return the ms of its median step."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "instep":
            command = [BIN / "instep", "train", FILES[name], "-n", processes, "--epochs", 2, "--batch-size", 16]
            run([*command, "--drop-last", "--save-every", "never", "--run-dir", folder])
            ends = [event["time"] for event in read_events(Path(folder)) if event["event"] == "step"]
        else:
            torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", processes]
            ends = json.loads(run([*torchrun, FILES[name]]).splitlines()[-1])["ends"]
    half = len(ends) // 2
    pairs = [*itertools.pairwise(ends[SKIPPED:half]), *itertools.pairwise(ends[half + SKIPPED :])]
    return 1e3 * statistics.median(after - before for before, after in pairs)


def run(command):
    """Run a command with one thread a process; return what it prints."""
    environment = {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:/usr/bin:/bin"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def count_lines(path):
    """Count the lines of code that say what is trained and how."""
    tree = ast.parse(path.read_text())
    marked = {line for node in tree.body for line in _lines(node) if not isinstance(node, ast.Import | ast.ImportFrom)}
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in _lines(node)
    }
    texts = path.read_text().splitlines()
    measures = ("ends", "sys.path", "json")
    return sum(
        1
        for number in sorted(marked - docstrings)
        if texts[number - 1].strip() and not any(word in texts[number - 1] for word in measures)
    )


def _lines(node):
    return range(node.lineno, node.end_lineno + 1)


if __name__ == "__main__":
    main()
