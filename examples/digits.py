"""Handwritten digits, 8x8: the smallest whole example.

python examples/digits.py                                      one process
instep train examples/digits.py -n 4 lr=3e-4 --epochs 5        four processes, the same answer
torchrun --nproc-per-node 4 examples/digits.py                 the same, under torchrun
instep predict RUN --out digits.csv                            what it has learned, for each test image
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Digits(instep.Task):
    """Handwritten digits, 8x8."""

    lr: float = 1e-3
    hidden: int = 256

    def model(self):
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(self.hidden, 10))

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)

    def train_data(self):
        return instep.data.digits("train")

    def eval_data(self):
        return instep.data.digits("test")

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float()}

    def predict(self, model, batch):
        return {"digit": model(batch[0]).argmax(1)}


if __name__ == "__main__":
    instep.main(Digits)
