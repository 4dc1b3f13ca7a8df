"""What it costs to compare the ranks: training on 2 processes with and without, in turns.

python benchmarks/guard_cost.py
python benchmarks/guard_cost.py --every 1 --rounds 4      the price of a single comparison

The jobs take about 20 ms a step on two cores. A turn should hold many comparisons, else it is chance how many it has.
"""

import argparse
import statistics
import sys
import time
from functools import partial

import torch
from machine import BIN, HERE, table, write_result
from scaling_task import Scaling
from turns import ratios, step_times

from instep.guard.fingerprint import fingerprints, updated_state

BATCH = {"mlp": 2048, "conv": 8, "transformer": 2}
GOAL = 1.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=float, default=8.0, help="seconds")
    parser.add_argument("--every", type=int, default=100, help="steps between two comparisons")
    parser.add_argument("--kinds", default="mlp,conv,transformer")
    parser.add_argument("--comm", default="auto")
    parser.add_argument("--name", default="guard_cost", help="of the file with the results")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds.split(","):
        # Twice the same without: how far apart two equal ways come out is what a difference has to exceed.
        ways = {"never": 0, "never, again": 0, f"every {args.every}": args.every}
        commands = {way: partial(command, kind, every, args.comm) for way, every in ways.items()}
        times = step_times(commands, args.rounds, args.turn)
        rows.append([*row(kind, times, list(ways)), *alone(kind, times["never"], args.every)])
        print(*rows[-1], flush=True)
    header = ["job", "batch", "ms a step without", f"every {args.every} / never", "never / never", "goal"]
    header += ["ms of one fingerprint", f"of {args.every} steps"]
    title = f"Comparing the ranks: the cost of a step, -n 2, {args.rounds} turns of {args.turn:g} s each"
    write_result("guard_cost", title, table(header, rows), sys.argv[1:], args.name)


def command(kind, every, comm, run_dir):
    words = [
        *(BIN / "instep", "train", HERE / "scaling_task.py", f"kind={kind}", "-n", 2, "--steps", 10**6),
        *("--batch-size", BATCH[kind], "--threads", 1, "--comm", comm, "--save-every", "never"),
        *("--run-dir", run_dir, "--quiet", "--json", "--check-every", every),
    ]
    return [(words, run_dir)]


def row(kind, times, ways):
    plain, again, checked = ways
    ms = statistics.median(step for turn in times[plain] for step in turn)
    cost = statistics.median(ratios(times, checked, plain))
    noise = statistics.median(ratios(times, again, plain))
    verdict = f"<= {GOAL}: {'reached' if cost <= GOAL else 'missed'}"
    return [kind, BATCH[kind], f"{ms:.2f}", f"{cost:.4f}", f"{noise:.4f}", verdict]


def alone(kind, turns, every):
    """Time the fingerprint of all of a job's state by itself: most of a comparison, and less at the mercy of chance."""
    torch.set_num_threads(1)
    task = Scaling(kind=kind)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    tensors = list(updated_state(model, optimizer).values())
    took = []
    for _ in range(21):
        begun = time.perf_counter()
        fingerprints(tensors)
        took.append(1000 * (time.perf_counter() - begun))
    ms = statistics.median(took)
    step_ms = statistics.median(step for turn in turns for step in turn)
    return [f"{ms:.2f}", f"{100 * ms / (every * step_ms):.2f} %"]


if __name__ == "__main__":
    main()
