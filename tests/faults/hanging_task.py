"""A Task that hangs in one way or another, in its first attempt only where it is told so."""

import os
import signal
import threading
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def say():
    print("hangs at", time.time(), flush=True)


class Samples(torch.utils.data.Dataset):
    """Reads from a pipe that nobody writes to, at one sample."""

    def __init__(self, blocks, locks):
        self.blocks, self.locks = blocks, locks
        self.lock = threading.Lock()

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if self.blocks and index == 41 and ATTEMPT == 0:
            say()
            reading, _writing = os.pipe()
            os.read(reading, 1)  # blocks here
        if self.locks and index == 41:
            say()
            self.lock.acquire()
            self.lock.acquire()  # deadlocks here
        return torch.full((6,), float(index)), index % 3


@dataclass(kw_only=True)
class Hanging(instep.Task):
    how: str = ""
    at: int = 4

    def model(self):
        return nn.Linear(6, 3)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)

    def train_data(self):
        return Samples(self.how == "read", self.how == "lock")

    def loss(self, model, batch):
        x, y = batch
        self.calls = getattr(self, "calls", 0) + 1
        if self.how == "compute":
            time.sleep(0.3)  # so that a step's time is seen
        if self.calls == self.at and RANK == 1 and self.how in ("stop", "sleep", "recv", "compute", "barrier"):
            say()
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.how == "sleep":
                time.sleep(1000)  # sleeps here
            if self.how == "compute":
                any(iter(int, 1))  # computes here
            if self.how == "barrier":
                torch.distributed.barrier()  # one's own
            if self.how == "recv":
                torch.distributed.recv(torch.zeros(1), src=0)  # another collective
        return F.cross_entropy(model(x), y)
