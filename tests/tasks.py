"""Small Tasks for tests, importable by the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import instep


def made_up(count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator).to(dtype), torch.randint(0, 3, (count,), generator=generator)


@dataclass(kw_only=True)
class Small(instep.Task):
    """A small classifier in float64."""

    lr: float = 0.05
    num_samples: int = 43

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def train_data(self) -> Any:
        return made_up(self.num_samples)

    def eval_data(self) -> Any:
        return made_up(23, seed=2)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}
