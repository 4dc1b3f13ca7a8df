"""A Task whose speed is read from a file, so that a test can have it slow while it does something to it."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Paced(instep.Task):
    pace: str
    """A file with the seconds that each part of a batch takes."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)

    def train_data(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(103, 6, generator=generator).double()
        return x, torch.randint(0, 3, (103,), generator=generator)

    def loss(self, model, batch):
        time.sleep(float(Path(self.pace).read_text()))
        x, y = batch
        return F.cross_entropy(model(x), y)


if __name__ == "__main__":
    instep.main(Paced)
