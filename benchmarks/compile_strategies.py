"""What --compile gives each strategy: GPT-2 small on two ranks of one GPU, compiled and not.

python benchmarks/compile_strategies.py [--strategies ddp fsdp pipeline]

bf16, context 1024, a global batch of 32. Both ranks compute on the same GPU, in turns, and NCCL goes through sockets:
the milliseconds say how compiled and uncompiled compare, and nothing of two GPUs.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from machine import table, write_result
from peak_memory import instep_rank, peak_in, run_ranks
from turns import ends_of

WAYS = ("--no-compile", "--compile")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "pipeline"])
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    rows = []
    for strategy in args.strategies:
        (plain_ms, plain_gib), (ms, gib) = (measure(strategy, way, args.steps) for way in WAYS)
        numbers = [f"{plain_ms:.1f}", f"{ms:.1f}", f"{ms / plain_ms:.2f}", f"{plain_gib:.1f}", f"{gib:.1f}"]
        rows.append([strategy, *numbers])
        print(*rows[-1], sep="  ", flush=True)
    header = ["strategy", "uncompiled, ms a step", "compiled", "ratio", "uncompiled, GiB a rank", "compiled"]
    lines = [*table(header, rows), "", "Medians of the second half of the steps; the largest peak of the ranks."]
    write_result(
        "compile_strategies", "--compile by strategy, GPT-2 small on two ranks of one GPU", lines, sys.argv[1:]
    )


def measure(strategy, way, steps):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(f"{strategy} {way}", 2, lambda rank, port: instep_rank(strategy, 2, rank, port, steps, folder, way))
        ends = ends_of(folder / "run")
        return 1000 * statistics.median(b - a for a, b in pairwise(ends[steps // 2 :])), peak_in(folder)


if __name__ == "__main__":
    main()
