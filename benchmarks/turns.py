"""Several trainings at once, of which one works at a time: all meet the same minutes of a machine whose speed changes.

A way to train is one `instep train` command or several that work together. All are started, and then take turns of
a second or so: the ranks and launchers of all others are stopped (SIGSTOP). A step in which a turn ends counts for
nobody.
"""

import bisect
import contextlib
import itertools
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

import psutil

START_LIMIT_S = 120


def step_times(ways, rounds, turn_s):
    """Run each way's commands, made by `ways[name](folder)`, in turns; give the ms of the steps by way and turn."""
    with tempfile.TemporaryDirectory() as folder:
        folders, jobs, launchers, trackers = {}, [], {}, {}
        try:
            for name, make in ways.items():
                commands = make(Path(folder) / str(len(folders)))
                folders[name] = [run_dir for _, run_dir in commands]
                for command, _ in commands:
                    jobs.append(subprocess.Popen(list(map(str, command)), **_SILENT))
                launchers[name] = [job.pid for job in jobs[-len(commands) :]]
                ranks = wait_for_ranks(folders[name], jobs)
                trackers[name] = trackers_of(launchers[name], folders[name])
                signal_all([*launchers[name], *ranks, *trackers[name]], signal.SIGSTOP)
            pids = {name: [*launchers[name], *ranks_of(dirs), *trackers[name]] for name, dirs in folders.items()}
            turns = take_turns(pids, rounds, turn_s)
            ends = {name: [ends_of(run_dir) for run_dir in dirs] for name, dirs in folders.items()}
        finally:
            for job in jobs:
                job.kill()
                job.wait()
            for name, dirs in folders.items():
                signal_all([*ranks_of(dirs), *trackers.get(name, ())], signal.SIGKILL)
    return {name: [in_step([within(each, turn) for each in ends[name]]) for turn in turns[name]] for name in ways}


def in_step(of_commands):
    """Return the ms of a way's steps; where several commands work side by side, of the slower one of each step."""
    return [max(steps) for steps in zip(*of_commands, strict=False)]


_SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def ratios(times, above, below):
    """Compare two ways turn by turn: the ratio of their mean steps in turns that follow one another."""
    pairs = zip(times[above], times[below], strict=True)
    return [statistics.fmean(a) / statistics.fmean(b) for a, b in pairs if a and b]


def take_turns(pids, rounds, turn_s):
    """Let one way work at a time; give each one's turns, as pairs of moments."""
    turns = {name: [] for name in pids}
    for _ in range(rounds):
        for name in random.sample(list(pids), len(pids)):
            begun = time.time()
            signal_all(pids[name], signal.SIGCONT)
            time.sleep(turn_s)
            turns[name].append((begun, time.time()))
            signal_all(pids[name], signal.SIGSTOP)
    return turns


def within(ends, turn):
    """Return the ms of the steps that began and ended within a turn."""
    first, last = (bisect.bisect(ends, moment) for moment in turn)
    return [1000 * (b - a) for a, b in itertools.pairwise(ends[first:last])]


def wait_for_ranks(run_dirs, jobs):
    """Wait until a way has made some steps; give its ranks' pids."""
    deadline = time.monotonic() + START_LIMIT_S
    while not all(len(ends_of(run_dir)) > 3 for run_dir in run_dirs):
        if time.monotonic() > deadline or any(job.poll() is not None for job in jobs):
            sys.exit(
                f"{[job.args for job in jobs if job.poll() is not None] or run_dirs} did not come to a fourth step"
            )
        time.sleep(0.2)
    return ranks_of(run_dirs)


def trackers_of(launchers, run_dirs):
    """Wait until the trackers of a way, if it has any, have sent something; give their processes' pids."""
    processes = [child for pid in launchers for child in psutil.Process(pid).children()]
    trackers = [process for process in processes if "instep.monitor.tracking.process" in process.cmdline()]
    deadline = time.monotonic() + START_LIMIT_S
    while trackers and not sum(len(noted_by(run_dir)) for run_dir in run_dirs) >= len(trackers):
        if time.monotonic() > deadline:
            sys.exit(f"the trackers of {run_dirs} have sent nothing")
        time.sleep(0.2)
    return [process.pid for tracker in trackers for process in (tracker, *tracker.children(recursive=True))]


def noted_by(run_dir):
    """Return the notes of trackers that have sent a step."""
    notes = (json.loads(path.read_text()) for path in (run_dir / "trackers").glob("[a-z]*.json"))
    return [note for note in notes if note["steps"]]


def ranks_of(run_dirs):
    pids = []
    for path in [path for run_dir in run_dirs for path in (run_dir / "events").glob("rank-*.jsonl")]:
        pids.append(json.loads(path.read_text().splitlines()[0])["pid"])
    return pids


def ends_of(run_dir):
    """When the steps ended, by rank 0's log."""
    path = run_dir / "events" / "rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["time"] for event in events if event["event"] == "step"]


def signal_all(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
