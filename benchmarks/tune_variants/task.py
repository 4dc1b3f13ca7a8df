"""The search's training as a Task: mnist_variants/task.py with two fields to search."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Mnist(instep.Task):
    root: str
    lr: float = 1e-3
    hidden: int = 256

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr, fused=True)

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
