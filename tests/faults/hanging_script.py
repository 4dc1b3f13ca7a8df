"""Anyone's DDP script, which hangs in the way that its first argument names."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how, backend = sys.argv[1:3]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
lock = threading.Lock()


def say():
    print("hangs at", time.time(), flush=True)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if how == "lock" and rank == 1 and index == 25:
            say()
            lock.acquire()
            lock.acquire()  # deadlocks here
        return torch.full((8,), float(index))


def main():
    dist.init_process_group(backend)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=1 if how == "lock" else 0)
    for step, x in enumerate(loader):  # waits for data
        if rank == 1 and step == 6 and attempt == 0 and how in ("stop", "leave", "late", "barrier"):
            say()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "leave":
                break
            if how == "late":
                left()
            if how == "barrier":
                dist.barrier()  # another collective
        if how == "late":
            dist.all_reduce(x)  # adds up
        optimizer.zero_grad()
        model(x).square().mean().backward()  # the reduction
        optimizer.step()
    if how == "leave" and rank == 1:
        left()
    if how == "evaluate" and rank == 0:
        until = time.monotonic() + 6
        while time.monotonic() < until:
            torch.randn(64, 64).mm(torch.randn(64, 64))
    if how == "together":
        say()
        dist.recv(torch.zeros(1), src=1 - rank)  # nobody sends
    dist.barrier()  # the last one
    print("done", rank, flush=True)


def left():
    threading.Event().wait()  # left the loop


main()
