"""The ranks of allreduce.py, started by torchrun: allreduce_ranks.py SIZES."""

import gc
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist


def main(sizes):
    torch.set_num_threads(1)
    dist.init_process_group("instep")
    gloo = dist.new_group(backend="gloo")
    medians = {}
    for name, (num_bytes, rounds) in sizes.items():
        numbers, spare = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        ways = {
            "gloo": lambda numbers=numbers, gloo=gloo: dist.all_reduce(numbers, group=gloo),
            "lane": lambda numbers=numbers: dist.all_reduce(numbers),
            "copy": lambda numbers=numbers, spare=spare: spare.copy_(numbers),
        }
        times = {way: [] for way in ways}
        for _ in range(rounds + 2):
            for way, run in ways.items():
                numbers.fill_(1.0)
                dist.barrier()
                begun = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - begun)
        medians[name] = {way: slowest_median(seconds[2:]) for way, seconds in times.items()}
    if dist.get_rank() == 0:
        print(json.dumps(medians))
    del gloo, ways
    gc.collect()
    dist.destroy_process_group()


def slowest_median(seconds):
    """The median over rounds of the slowest rank's time, in ms."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(1000 * statistics.median(slowest.tolist()), 4)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
