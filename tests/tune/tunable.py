"""Tasks to search: a plain one, one that ends in the way its field says, one with a space of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import instep

Ending = Literal["well", "crash", "diverge", "memory", "hang"]


def made_up(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@dataclass(kw_only=True)
class Plain(instep.Task):
    """A small classifier."""

    lr: float = 0.05
    hidden: int = 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 3))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def train_data(self) -> Any:
        return made_up(64, 1)

    def eval_data(self) -> Any:
        return made_up(50, 2)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}


@dataclass(kw_only=True)
class Faulty(Plain):
    """A small classifier, and ways to fail."""

    ending: Ending = "well"

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if self.ending == "crash":
            raise RuntimeError("a bug of one's own")
        if self.ending == "memory":
            raise torch.OutOfMemoryError("out of memory: tried to allocate 99 GiB")
        if self.ending == "hang":
            time.sleep(3600)
        return loss * float("nan") if self.ending == "diverge" else loss


@dataclass(kw_only=True)
class Conditional(Plain):
    """A Task with a space of its own: momentum matters for one of two optimizers only."""

    kind: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.kind == "adam":
            return torch.optim.Adam(params, lr=self.lr)
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)

    def search_space(self, trial: Any) -> None:
        trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
            trial.suggest_float("momentum", 0.0, 0.9)
