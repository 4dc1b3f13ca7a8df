"""How long a save holds training up: torch.save, torch.distributed.checkpoint (save, async_save) and instep, in turns.

python benchmarks/checkpoint_stall.py [--megabytes 208] [--device cuda]

One process, AdamW: the state is three times the weights. A method is called between two steps, in turns with the
others, and a few steps are made after it. "blocked" is how long the call took; "steps beside" how much longer the steps
that followed it took than undisturbed ones, which is what writing in the background costs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import Bars, table, write_result
from torch import nn

import instep

STEPS_BETWEEN = 12


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=208, help="of weights")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="checkpoint_stall", help="of the file with the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        blocked, beside = measure(args, Path(folder))
    lines = report(args, blocked, beside)
    values = {name: statistics.median(times) for name, times in blocked.items()}
    bars = [Bars(f"A save of {3 * args.megabytes} MB on {args.device}: training waits", "ms", values)]
    write_result("checkpoint_stall", "How long a save holds training up", lines, sys.argv[1:], args.name, bars)


def measure(args, folder):
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)
    width = 1024
    depth = round(args.megabytes * 1e6 / (4 * width * width))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    blocked, beside = {}, {}
    with instep.start(run_dir=str(folder / "run"), batch_size=8, steps=10**6, save_every="1000000", quiet=True) as run:
        network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        model, optimizer = run.prepare(network, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True))
        steps = trained(run, model, torch.randn(4096, width))
        ways = make_ways(run, model, optimizer, folder)
        for _ in range(30):
            next(steps)
        for number in range(args.rounds + 1):
            plain = [next(steps) for _ in range(STEPS_BETWEEN)]
            for name, (save, finish) in ways.items():
                synchronize(args.device)
                begun = time.perf_counter()
                save(number)
                taken = 1000 * (time.perf_counter() - begun)
                after = [next(steps) for _ in range(STEPS_BETWEEN)]
                finish()
                if number:  # the first of each gets its memory
                    blocked.setdefault(name, []).append(taken)
                    beside.setdefault(name, []).append(sum(after) - STEPS_BETWEEN * statistics.median(plain))
        steps.close()
    return blocked, beside


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def trained(run, model, data):
    """Make steps; give the ms of each."""
    begun = time.perf_counter()
    for step in run.steps(data):
        for x in step.shards():
            step.backward(model(x).square().mean())
        step.finish()
        yield 1000 * (time.perf_counter() - begun)
        begun = time.perf_counter()


def make_ways(run, model, optimizer, folder):
    """Return for each way how to save, and how to wait for what it left running."""
    pending = []

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def async_save(number):
        pending.append(dcp.async_save(state(), checkpoint_id=folder / f"async-{number % 2}"))

    return {
        "torch.save": (lambda _: torch.save(state(), folder / "saved.pt"), lambda: None),
        "torch.distributed.checkpoint.save": (
            lambda n: dcp.save(state(), checkpoint_id=folder / f"dcp-{n % 2}"),
            lambda: None,
        ),
        "torch.distributed.checkpoint.async_save": (async_save, lambda: pending.pop().result()),
        "instep": (lambda _: run.save(), run.finish_saving),
    }


def report(args, blocked, beside):
    lowest = min(statistics.median(values) for name, values in blocked.items() if name != "instep")
    rows = []
    for name, values in blocked.items():
        middle = statistics.median(values)
        goal = ("reached" if middle < lowest else "missed") if name == "instep" else ""
        rows.append([name, f"{middle:.0f}", f"{max(values):.0f}", f"{statistics.median(beside[name]):.0f}", goal])
    sizes = f"{args.megabytes} MB of weights, {3 * args.megabytes} MB of state"
    title = f"## {sizes}, on {args.device}, {args.rounds} saves each"
    header = ["way", "blocked, median ms", "worst ms", "steps beside, median ms", "lowest of all"]
    return [title, "", *table(header, rows), ""]


if __name__ == "__main__":
    main()
