"""What watching costs: phases alone; heartbeat, phases, comparison of the ranks, events together; on and off in turns.

python benchmarks/overhead.py [--gpu]

Two processes train the same model in one run; with --gpu one does, and a larger model. Every few steps what is measured
is switched off or on again, on all ranks at the same step. Blocks are short, so that a slow second of the machine is
everyone's, and there are many: the ratio is that of the means, without the most disturbed tenth of the pairs on either
side, and its interval is what 95 % of resampled sets of pairs give.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import BIN, HERE, table, write_result
from torch import nn

sys.path.insert(0, str(HERE / "recovery_variants"))
from jobs import BATCH, made_up_data, network

from instep.guard.pulse import here

BLOCK = 20
"""Steps. Every fifth block holds the step after which ranks are compared (100), so as many with as without."""
GOALS = {"phases": 1.005, "all four": 1.01}
RESAMPLED = 2000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=500, help="of blocks, for each row")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--what", choices=GOALS, help="of a rank: what is switched", default="all four")
    args = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(args)
        return
    rows = [row for what in GOALS for row in rows_of(what, args)]
    header = ["what", "median ms a step", "ratio of means", "95 % of resampled ratios", "goal", ""]
    write_result(
        "overhead",
        f"What watching costs, {args.pairs} pairs of {BLOCK} steps each",
        table(header, rows),
        sys.argv[1:],
        "overhead_gpu" if args.gpu else "overhead",
    )


def rows_of(what, args):
    """Train once, and return what one part of watching costs, with the control."""
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "instep", "run", "-n", 1 if args.gpu else 2, Path(__file__).resolve(), "--what", what]
        command += ["--pairs", args.pairs, *["--gpu"] * args.gpu]
        subprocess.run(list(map(str, command)), cwd=folder, check=True)
        times = [float(line) for line in (Path(folder) / "times").read_text().split()]
    on, off = times[0::2], times[1::2]
    ratio, low, high = ratio_of(list(zip(on, off, strict=True)))
    control, control_low, control_high = ratio_of(list(zip(off[2::2], off[1:-1:2], strict=False)))
    goal = GOALS[what]
    return [
        [what, ms(on), f"{ratio:.4f}", f"{low:.4f} to {high:.4f}", f"<= {goal}", judged(ratio, high, goal)],
        [f"without {what}", ms(off), "1", "", "", ""],
        ["control: without / without", "", f"{control:.4f}", f"{control_low:.4f} to {control_high:.4f}", "", ""],
    ]


def ms(times):
    return f"{1000 * statistics.median(times):.3f}"


def judged(ratio, high, goal):
    if ratio > goal:
        return "missed"
    return "reached" if high <= goal else "reached; the interval reaches beyond"


def ratio_of(pairs):
    """Return the ratio of means of pairs, without the most disturbed ones, and an interval for it."""
    pairs = sorted(pairs, key=lambda pair: pair[0] / pair[1])
    pairs = pairs[len(pairs) // 10 : -(len(pairs) // 10) or None]
    draw = random.Random(0)
    ratios = sorted(mean_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    return mean_ratio(pairs), ratios[RESAMPLED // 40], ratios[-RESAMPLED // 40]


def mean_ratio(pairs):
    return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)


def be_a_rank(args):
    import instep

    torch.set_num_threads(1)
    with instep.start(run_dir="run", seed=0, save_every="never") as run:
        model, _ = run.prepare(deep_network() if args.gpu else network(), lambda p: torch.optim.Adam(p, lr=1e-3))
        real = run.log.step, run._replica_check.is_due
        x, y = made_up_data()
        times, begun = [], time.perf_counter()
        for step in run.steps((x, y), batch_size=BATCH, steps=BLOCK * (2 * args.pairs + 2)):
            for a, b in step.shards():
                step.backward(torch.nn.functional.cross_entropy(model(a), b))
            step.finish()
            if step.number % BLOCK == 0:
                times.append((time.perf_counter() - begun) / BLOCK)
                switch(run, args.what, step.number // BLOCK % 2 == 0, real)
                begun = time.perf_counter()
        switch(run, args.what, True, real)
        if run.is_main:
            Path("times").write_text(" ".join(map(str, times[2:])))


def deep_network():
    """Return a model whose steps take about 20 ms on a large GPU."""
    layers = [layer for _ in range(24) for layer in (nn.Linear(6000, 6000), nn.ReLU())]
    return nn.Sequential(nn.Linear(784, 6000), *layers, nn.Linear(6000, 10))


def switch(run, what, on, real):
    """Switch phases, or all of it, on or off."""
    log, is_due = real
    pulse, phases = here(), run._times._phases
    if phases._times is not None:
        phases._times.end_step()  # no step is timed on the device beyond this one
    for thing, name in ((phases, "end_step"), (pulse, "beat"))[: 1 if what == "phases" else 2]:
        if on:
            vars(thing).pop(name, None)
        else:
            setattr(thing, name, lambda *_: None)
    if what != "phases":
        run.log.step = log if on else lambda _: None
        run._replica_check.is_due = is_due if on else lambda _: False


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
