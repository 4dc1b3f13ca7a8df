"""A small DDP training that ends in the way that its first argument names."""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(way: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    workers = 2 if way == "workers" else 0
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == 4:
                act(way, rank, model)


def act(way: str, rank: int, model: torch.nn.Module) -> None:
    if way == "crash" and rank == 1:
        raise ZeroDivisionError("rank 1 divides by zero")
    if way == "exit" and rank == 1:
        os._exit(7)
    if way == "killed" and rank == 1:
        os.kill(os.getpid(), 9)
    if way == "hang" and rank == 1:
        time.sleep(1000)
    if way == "endless":
        while True:
            model(torch.randn(2, 4))
    if way == "stdin":
        input("your name: ")
    if way == "loud":
        for number in range(500_000):
            print(number)
    if way == "alone" and rank == 1:  # it makes steps that the other rank does not make
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for _ in range(40):
            optimizer.step()
    if way == "fork" and os.fork() == 0:
        for _ in range(40):
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        os._exit(0)


def main() -> None:
    way = sys.argv[1]
    dist.init_process_group("gloo")
    if way == "swallow":
        with contextlib.suppress(BaseException):
            train(way)
        Path(f"after-{dist.get_rank()}.txt").write_text("the script went on after the watch")
    else:
        train(way)


def spawned(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    train("spawned")


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(spawned, args=(int(sys.argv[2]),), nprocs=2)
    else:
        main()
