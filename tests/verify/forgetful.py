"""A Task with a memory that no checkpoint holds: its loss depends on how many it has computed before."""

from dataclasses import dataclass

import torch

import instep


@dataclass(kw_only=True)
class Forgetful(instep.Task):
    def model(self):
        return torch.nn.Linear(4, 1)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)

    def train_data(self):
        return torch.arange(640.0).view(160, 4) / 640

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return (model(batch) - self.calls % 7).square().mean()
