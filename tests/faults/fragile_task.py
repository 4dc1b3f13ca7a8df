"""A Task whose rank 0 is killed, or raises, after so many steps of every attempt."""

import multiprocessing
import os
import signal
from dataclasses import dataclass

import torch

import instep


@dataclass(kw_only=True)
class Fragile(instep.Task):
    lives: int = 6
    raises: bool = False

    def model(self):
        self.kept = multiprocessing.get_context("spawn").Semaphore()  # has a name, which somebody must remove
        print("semaphore", self.kept._semlock.name, flush=True)
        return torch.nn.Linear(4, 1)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def train_data(self):
        return torch.arange(160.0).view(40, 4) / 160

    def loss(self, model, batch):
        return (model(batch) - 1).square().mean()

    def on_step(self, record):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.lives:
            if self.raises:
                raise KeyError("sample 17")
            os.kill(os.getpid(), signal.SIGKILL)
