"""From typing the command to the first optimizer step, on two processes: instep train against torchrun.

python benchmarks/startup.py --repeats 9

The same file, the same job, fresh processes each time; the two take turns. The first step's moment is the
`time` of the first "step" event in the run's log, the beginning is the clock just before the command starts.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import BIN, HERE, ROOT, Bars, table, write_result

COMMANDS = ("instep train", "torchrun")
GOAL = 0.75
MOMENTS = (
    "Python of the command is up",
    "launcher: torch imported",
    "launcher: ranks have met (rendezvous)",
    "rank 0: torch imported",
    "rank 0: torch._dynamo imported",
    "rank 0: begins to join the process group",
    "rank 0: process group joined",
    "rank 0: run opened (start event)",
    "rank 0: model, data and plan ready (plan event)",
    "rank 0: first step made",
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--split-repeats", type=int, default=3, help="runs that show the split; not timed")
    return parser.parse_args()


def main():
    args = parse_args()
    totals = {command: [] for command in COMMANDS}
    splits = {command: [] for command in COMMANDS}
    for repeat in range(args.repeats + args.split_repeats):
        for command in COMMANDS:
            moments = measure(command, traced=repeat >= args.repeats)
            (totals if repeat < args.repeats else splits)[command].append(moments)
            print(f"{repeat + 1}  {command:<12}  first step after {moments[MOMENTS[-1]]:.2f} s", flush=True)
    lines = summary(totals) + split_table(splits)
    values = {name: statistics.median(moments[MOMENTS[-1]] for moments in runs) for name, runs in totals.items()}
    bars = [Bars("From the command to the first step, 2 processes", "s", values)]
    write_result("startup", "Start-up: from the command to the first step, 2 processes", lines, sys.argv[1:], bars=bars)


def measure(command, traced):
    """Start the job in fresh processes; give the seconds from the command to each moment."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        trace = Path(folder) / "trace.jsonl"
        if traced:
            shutil.copy(HERE / "startup_trace.py", Path(folder) / "sitecustomize.py")
            before = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = folder + (os.pathsep + before if before else "")
            environment["STARTUP_TRACE"] = str(trace)
        begun = time.time()
        done = subprocess.run(arguments(command, folder), cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        events = read_lines(Path(folder) / "run" / "events" / "rank-0.jsonl")
        moments = moments_of(events, read_lines(trace) if traced else [])
    return {name: when - begun for name, when in moments.items()}


def arguments(command, folder):
    """The same job either way: one step on the digits."""
    job = ["--steps", "1", "--threads", "1", "--run-dir", f"{folder}/run"]
    if command == "torchrun":
        launcher = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "examples/digits.py"]
    else:
        launcher = [BIN / "instep", "train", "examples/digits.py", "-n", "2"]
    return [*map(str, launcher), *job]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def moments_of(events, trace):
    """Find each moment's time in the log, and in the trace if there is one."""
    first = {}
    for event in events:
        first.setdefault(event["event"], event)
    moments = {
        MOMENTS[7]: first["start"]["time"],
        MOMENTS[8]: first["plan"]["time"],
        MOMENTS[9]: first["step"]["time"],
    }
    if trace:
        launcher, rank = trace[0]["pid"], first["start"]["pid"]

        def look(name, what, moment, pid):
            # A rank that is a fork of the command is born with torch: the import is then the command's.
            times = {line["pid"]: line["time"] for line in trace if (line["what"], line["moment"]) == (what, moment)}
            if pid in times:
                moments[name] = times[pid]
            elif what.startswith("import") and launcher in times:
                moments[name] = times[launcher]

        look(MOMENTS[0], "python", "begin", launcher)
        look(MOMENTS[1], "import torch", "end", launcher)
        look(MOMENTS[2], "rendezvous", "end", launcher)
        look(MOMENTS[3], "import torch", "end", rank)
        look(MOMENTS[4], "import torch._dynamo", "end", rank)
        look(MOMENTS[5], "process group", "begin", rank)
        look(MOMENTS[6], "process group", "end", rank)
    return moments


def summary(totals):
    """Lay out the totals and their ratio."""
    medians, rows = {}, []
    for command in COMMANDS:
        seconds = [moments[MOMENTS[-1]] for moments in totals[command]]
        medians[command] = statistics.median(seconds)
        rows.append([command, f"{medians[command]:.2f}", f"{min(seconds):.2f}–{max(seconds):.2f}"])
    ratio = medians["instep train"] / medians["torchrun"]
    verdict = "reached" if ratio <= GOAL else "missed"
    return [
        f"## Seconds to the first optimizer step, median of {len(totals['torchrun'])}",
        "",
        *table(["command", "seconds", "lowest–highest"], rows),
        "",
        f"instep / torchrun: **{ratio:.2f}** (goal: <= {GOAL}, {verdict})",
        "",
    ]


def split_table(splits):
    """Lay out when each moment comes, from the traced runs."""
    rows = []
    for name in MOMENTS:
        cells = []
        for command in COMMANDS:
            seconds = [moments[name] for moments in splits[command] if name in moments]
            cells.append(f"{statistics.median(seconds):.2f}" if seconds else "–")
        rows.append([name, *cells])
    count = len(splits["torchrun"])
    return [
        f"## Where they go: seconds since the command, median of {count} traced runs",
        "",
        *table(["moment", *COMMANDS], rows),
        "",
        "The ranks of instep train are forks of the command: the imports of rank 0 are the command's.",
        "",
    ]


if __name__ == "__main__":
    main()
