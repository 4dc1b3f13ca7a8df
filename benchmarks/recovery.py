"""From the SIGKILL of a rank to the next new optimizer step: instep and plain torchrun, in turns, on 2 processes.

python benchmarks/recovery.py [--kills 12]

torchrun restarts a plain DDP script that saves with torch.save at the end of each epoch of 50 steps; instep trains the
same job with `--save-every 10` (beside the training). Both are killed at random moments, the same ones for both.
A new step is one that had not been made before the kill: the steps that were lost are made again first. torchrun runs
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, as people run it, some of its restarts never come to a step.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import BIN, HERE, Bars, table, write_result

VARIANTS = HERE / "recovery_variants"
LIMIT_S = 120


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12)
    args = parser.parse_args()
    turns = {"torchrun": [], "instep": []}
    for turn in range(args.kills):
        for name in turns:
            with tempfile.TemporaryDirectory() as folder:
                turns[name].append(one_turn(name, Path(folder), random.Random(turn)))
            print(name, {key: round(value, 2) for key, value in turns[name][-1].items()}, flush=True)
    values = {name: statistics.median(kill["new"] for kill in kills) for name, kills in turns.items()}
    bars = [Bars("A rank is killed: time to the next new step", "s", values)]
    write_result("recovery", "From the SIGKILL of a rank to the next new step", report(turns), sys.argv[1:], bars=bars)


def one_turn(name, folder, rng):
    """Start a job, kill a rank, end the job; give what the kill cost."""
    command, logs = {
        "torchrun": (
            [BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", 99, VARIANTS / "by_hand.py", folder],
            folder,
        ),
        "instep": (
            [
                *(BIN / "instep", "train", VARIANTS / "jobs.py", "-n", 2, "--steps", 10**6, "--batch-size", 128),
                *("--save-every", 10, "--threads", 1, "--run-dir", folder / "run", "--quiet", "--max-restarts", 99),
            ],
            folder / "run" / "events",
        ),
    }[name]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen(list(map(str, command)), env=env, start_new_session=True, **silent)
    try:
        wait_for(lambda: len(events(logs, 0, "step")) >= 55)  # at least one epoch's save
        time.sleep(rng.uniform(0, 1.5))
        return kill_one(logs, rng.randrange(2))
    finally:
        pids = [events(logs, rank, "start")[-1]["pid"] for rank in range(2)]
        job.kill()
        job.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_one(logs, rank):
    pid = events(logs, rank, "start")[-1]["pid"]
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    last = max(e["step"] for e in events(logs, 0, "step") if e["time"] <= killed + 0.05)

    def after(kind, more=lambda event: True):
        return [e["time"] for e in events(logs, 0, kind) if e["time"] > killed + 0.05 and more(e)]

    wait_for(lambda: after("start") and after("step", lambda e: e["step"] > last))
    started = after("start")[0]
    again = [e for e in events(logs, 0, "step") if e["time"] > started]
    return {
        "start": started - killed,
        "first": again[0]["time"] - started,
        "new": next(e["time"] for e in again if e["step"] > last) - killed,
        "lost": last - again[0]["step"] + 1,
    }


def events(logs, rank, kind):
    path = logs / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if line.endswith("}") and (event := json.loads(line))["event"] == kind]


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("a job did not come as far as expected")
        time.sleep(0.25)  # the times are the events' own


def report(turns):
    def cells(name, key):
        values = [kill[key] for kill in turns[name]]
        return [f"{statistics.median(values):.2f}", f"{max(values):.2f}"]

    rows = [
        ["kill to the next new step", "new"],
        ["of this: detection, end of the others, processes, rendezvous", "start"],
        ["of this: model, data, checkpoint, first step", "first"],
        ["steps lost", "lost"],
    ]
    lines = table(
        ["seconds", "torchrun, median", "worst", "instep, median", "worst"],
        [[label, *cells("torchrun", key), *cells("instep", key)] for label, key in rows],
    )
    ratio = statistics.median(k["new"] for k in turns["instep"]) / statistics.median(
        k["new"] for k in turns["torchrun"]
    )
    verdict = "reached" if ratio <= 1 / 3 else "missed"
    return [
        f"{len(turns['instep'])} kills each.",
        "",
        *lines,
        "",
        f"instep / torchrun: {ratio:.2f} (goal 0.33: {verdict})",
        "",
    ]


if __name__ == "__main__":
    main()
