"""The same job as a Task: the network of the baselines, and no schedule, which they do not have either."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import network

import instep


@dataclass(kw_only=True)
class Mnist(instep.Task):
    root: str

    def model(self):
        return network()

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=1e-3, fused=True)

    def train_data(self):
        return instep.data.mnist("train", self.root)

    def eval_data(self):
        return instep.data.mnist("test", self.root)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x.flatten(1)), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x.flatten(1)).argmax(1) == y).float()}
