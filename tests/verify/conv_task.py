"""A small convolutional network with BatchNorm and dropout on the digits, for campaigns of faults."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import instep


class Conv(instep.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)),
        )

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=2e-3)

    def train_data(self) -> Any:
        return instep.data.digits("train")

    def eval_data(self) -> Any:
        return instep.data.digits("test")

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}


if __name__ == "__main__":
    instep.main(Conv)
