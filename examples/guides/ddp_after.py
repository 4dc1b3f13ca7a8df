"""Handwritten digits with instep.

instep train ddp_after.py -n 2 --epochs 3 --batch-size 64
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import instep


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


def load_data():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


@dataclass(kw_only=True)
class Digits(instep.Task):
    lr: float = 0.1
    hidden: int = 32

    def model(self):
        torch.manual_seed(0)  # only to start from the same weights as before; --seed does it otherwise
        return Net(self.hidden)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)

    def train_data(self):
        return load_data()[0]

    def eval_data(self):
        return load_data()[1]

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float()}


if __name__ == "__main__":
    instep.main(Digits)
