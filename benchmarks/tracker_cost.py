"""What trackers cost a training: -n 2 with three of them and without, in turns.

python benchmarks/tracker_cost.py
python benchmarks/tracker_cost.py --track csv,tensorboard,wandb --rounds 20

The ranks keep both cores busy, so that what the trackers' processes use is taken from the training. They are stopped
with their training when another one has its turn. The last columns are the CPU time of the trackers beside that of the
ranks, over some seconds of training after the trackers have opened: they hold on a machine that others use, too.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
from machine import BIN, HERE, table, write_result
from turns import ends_of, ranks_of, ratios, signal_all, step_times, trackers_of, wait_for_ranks

BATCH = {"mlp": 2048, "conv": 8, "transformer": 2}
GOAL = 1.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=float, default=4.0, help="seconds")
    parser.add_argument("--cpu", type=float, default=20.0, help="seconds in which CPU time is compared")
    parser.add_argument("--kinds", default="mlp,conv")
    parser.add_argument("--track", default="csv,tensorboard,mlflow")
    parser.add_argument("--name", default="tracker_cost", help="of the file with the results")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds.split(","):
        # Twice the same without: how far apart two equal ways come out is what a difference has to exceed.
        ways = {"none": "", "none, again": "", "tracked": args.track}
        times = step_times({way: partial(command, kind, track) for way, track in ways.items()}, args.rounds, args.turn)
        rows.append([*row(kind, times), *cpu_share(kind, args.track, args.cpu)])
        print(*rows[-1], flush=True)
    header = ["job", "batch", "ms a step without", "steps per second", "with / without, median", "its quarters"]
    header += ["without / without", "goal", "ms of CPU a step: ranks", "trackers", "share"]
    title = f"Trackers ({args.track}): the cost of a step, -n 2, {args.rounds} turns of {args.turn:g} s each"
    write_result("tracker_cost", title, table(header, rows), sys.argv[1:], args.name)


def command(kind, track, run_dir):
    words = [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", 2, "--steps", 10**6),
        *("--batch-size", BATCH[kind], "--threads", 1, "--save-every", "never", "--run-dir", run_dir),
        *("--quiet", "--json", *(("--track", track) if track else ())),
    ]
    return [(words, run_dir)]


def row(kind, times):
    ms = statistics.median(step for turn in times["none"] for step in turn)
    costs = sorted(ratios(times, "tracked", "none"))
    cost, noise = statistics.median(costs), statistics.median(ratios(times, "none, again", "none"))
    quarters = f"{costs[len(costs) // 4]:.3f} to {costs[3 * len(costs) // 4]:.3f}"
    verdict = f"<= {GOAL}: {'reached' if cost <= GOAL else 'missed'}"
    return [kind, BATCH[kind], f"{ms:.2f}", f"{1000 / ms:.0f}", f"{cost:.4f}", quarters, f"{noise:.4f}", verdict]


def cpu_share(kind, track, seconds):
    """Compare the CPU time of trackers and ranks, in one training."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (words, _), *_ = command(kind, track, run_dir)
        job, trackers = (
            subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
            [],
        )
        try:
            ranks = wait_for_ranks([run_dir], [job])
            trackers = trackers_of([job.pid], [run_dir])
            time.sleep(3)  # what had gathered while they opened is sent
            before, first = (cpu_s(ranks), cpu_s(trackers)), len(ends_of(run_dir))
            time.sleep(seconds)
            after, last = (cpu_s(ranks), cpu_s(trackers)), len(ends_of(run_dir))
        finally:
            job.kill()
            job.wait()
            signal_all([*ranks_of([run_dir]), *trackers], signal.SIGKILL)
    of_ranks, of_trackers = (1000 * (b - a) / (last - first) for a, b in zip(before, after, strict=True))
    return [f"{of_ranks:.2f}", f"{of_trackers:.3f}", f"{100 * of_trackers / of_ranks:.2f} %"]


def cpu_s(pids):
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
