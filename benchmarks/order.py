"""The first batch of an epoch: instep's order at a billion samples, DistributedSampler at ten million.

python benchmarks/order.py            add --full for DistributedSampler at a hundred million (4 GB)
"""

import argparse
import statistics
import sys
import time
import tracemalloc

import numpy as np
from machine import table, write_result

from instep.data.batch_plan import BatchPlan
from instep.data.order import SampleOrder

BATCH_SIZE = 256


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50, help="epochs looked at; the sampler takes at most 3")
    parser.add_argument("--full", action="store_true", help="DistributedSampler at 10^8 too: 4 GB, half a minute")
    return parser.parse_args()


def main():
    args = parse_args()
    rows = [row("instep", n, first_batch_of_instep, args.repeats) for n in (10**7, 10**8, 10**9)]
    for n in (10**7, 10**8) if args.full else (10**7,):
        rows.append(row("DistributedSampler", n, first_batch_of_sampler, min(args.repeats, 3)))
    lines = table(["order", "samples", "first batch, ms", "slowest, ms", "peak memory, MB"], rows)
    lines += ["", f"The first {BATCH_SIZE} sample numbers of an epoch, median over epochs. Goal at 10^9: "]
    lines[-1] += "under 1 ms and under 1 MB. Memory is what Python and NumPy allocate (tracemalloc); the sampler's "
    lines[-1] += "torch tensor of 8 bytes a sample comes on top of it."
    write_result("order", "The order of the samples: first batch of an epoch", lines, sys.argv[1:])


def row(name, num_samples, first_batch, repeats):
    """Time the first batch of several epochs; memory is measured apart, because tracing slows things down."""
    times = []
    for epoch in range(repeats):
        begun = time.perf_counter()
        first_batch(num_samples, epoch)
        times.append(1000 * (time.perf_counter() - begun))
    tracemalloc.start()
    first_batch(num_samples, repeats)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    exponent = len(str(num_samples)) - 1
    return [name, f"10^{exponent}", f"{statistics.median(times):.3f}", f"{max(times):.3f}", f"{peak / 1e6:.3f}"]


def first_batch_of_instep(num_samples, epoch):
    """Everything that a new epoch costs: the plan, the keys, the look-up."""
    where = BatchPlan(num_samples=num_samples, batch_size=BATCH_SIZE).batch(0)
    positions = np.arange(where.first_position, where.first_position + where.size)
    return SampleOrder(0, num_samples).indices(epoch, positions)


def first_batch_of_sampler(num_samples, epoch):
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(num_samples), num_replicas=2, rank=0)
    sampler.set_epoch(epoch)
    indices = iter(sampler)
    return [next(indices) for _ in range(BATCH_SIZE // 2)]


if __name__ == "__main__":
    main()
