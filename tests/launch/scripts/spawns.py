"""A script that starts its own ranks, as many tutorials do."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def leave_slowly() -> None:
    """Close the connections, so that the other rank fails, and ends first."""
    time.sleep(0.3)
    dist.destroy_process_group()
    time.sleep(1.5)


def work(rank: int, size: int, port: int, how: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    total = torch.full((1,), rank + 1.0)
    if rank == 1 and how == "raise":
        threading.Thread(target=leave_slowly).start()
        raise ValueError("rank one is unhappy")
    if rank == 1 and how == "hang":
        time.sleep(1000)  # hangs here
    dist.all_reduce(total)
    print(f"sum {float(total)}\n", end="", flush=True)  # in one write
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 3:  # under a launcher: the function itself, with a rendezvous of its own
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1]), sys.argv[2])
    else:
        mp.spawn(work, args=(2, int(sys.argv[1]), sys.argv[2]), nprocs=2)
