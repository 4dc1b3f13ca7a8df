"""The recovery benchmark's job: a model whose step takes some 20 ms on one thread, an epoch of 50 steps."""

from dataclasses import dataclass

import torch
from torch import nn

import instep

BATCH, EPOCH_STEPS, STEPS = 128, 50, 10**6


def network():
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def made_up_data():
    generator = torch.Generator().manual_seed(0)
    count = BATCH * EPOCH_STEPS
    return torch.randn(count, 784, generator=generator), torch.randint(10, (count,), generator=generator)


@dataclass(kw_only=True)
class Job(instep.Task):
    def model(self):
        return network()

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=1e-3)

    def train_data(self):
        return made_up_data()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
