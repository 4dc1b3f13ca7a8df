"""The same job as a Task: examples/mnist.py without its schedule, which the baselines don't have either."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Mnist(instep.Task):
    root: str

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=1e-3, fused=True)

    def train_data(self):
        return instep.data.mnist("train", self.root)

    def eval_data(self):
        return instep.data.mnist("test", self.root)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float()}
