"""What watching costs: heartbeat, phases, comparison of the ranks, events, as they are by default, on and off in turns.

python benchmarks/overhead.py

Two processes train the same model in one run. Every hundred steps all four are switched off or on again, on both ranks
at the same step; a block of a hundred steps with them holds one comparison.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import BIN, HERE, table, write_result

sys.path.insert(0, str(HERE / "recovery_variants"))
from jobs import BATCH, made_up_data, network

from instep.guard.pulse import here

BLOCK = 100
GOAL = 1.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=25, help="of blocks")
    args = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(args.pairs)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "instep", "run", "-n", "2", Path(__file__).resolve(), "--pairs", str(args.pairs)]
        subprocess.run(list(map(str, command)), cwd=folder, check=True)
        times = [float(line) for line in (Path(folder) / "times").read_text().split()]
    on, off = times[0::2], times[1::2]
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    control = [a / b for a, b in zip(off[1:], off[:-1], strict=True)]
    middle = statistics.median(ratios)
    spread = sorted(ratios)
    rows = [
        [
            "with",
            f"{1000 * statistics.median(on):.3f}",
            f"{middle:.4f}",
            f"{spread[len(spread) // 4]:.3f} to {spread[3 * len(spread) // 4]:.3f}",
            "reached" if middle <= GOAL else "missed",
        ],
        ["without", f"{1000 * statistics.median(off):.3f}", "1", "", ""],
        ["without / the block without before", "", f"{statistics.median(control):.4f}", "", ""],
    ]
    header = [
        "heartbeat, phases, comparison, events",
        "median ms a step",
        "ratio, median",
        "its quarters",
        f"<= {GOAL}",
    ]
    write_result(
        "overhead", f"What watching costs, {len(on)} blocks of {BLOCK} steps each", table(header, rows), sys.argv[1:]
    )


def be_a_rank(pairs):
    import instep

    torch.set_num_threads(1)
    with instep.start(run_dir="run", seed=0, save_every="never") as run:
        model, _ = run.prepare(network(), lambda p: torch.optim.Adam(p, lr=1e-3))
        real = run.log.step, run._replica_check.is_due
        x, y = made_up_data()
        times, begun = [], time.perf_counter()
        for step in run.steps((x, y), batch_size=BATCH, steps=BLOCK * (2 * pairs + 2)):
            for a, b in step.shards():
                step.backward(torch.nn.functional.cross_entropy(model(a), b))
            step.finish()
            if step.number % BLOCK == 0:
                times.append((time.perf_counter() - begun) / BLOCK)
                switch(run, step.number // BLOCK % 2 == 0, real)
                begun = time.perf_counter()
        switch(run, True, real)
        if run.is_main:
            Path("times").write_text(" ".join(map(str, times[2:])))


def switch(run, on, real):
    """Switch all of it on or off."""
    log, is_due = real
    pulse, phases = here(), run._times._phases
    for thing, name in ((pulse, "beat"), (phases, "end_step")):
        if on:
            vars(thing).pop(name, None)
        else:
            setattr(thing, name, lambda *_: None)
    run.log.step = log if on else lambda _: None
    run._replica_check.is_due = is_due if on else lambda _: False


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
