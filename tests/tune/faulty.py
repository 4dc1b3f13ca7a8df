"""A Task that ends in the way its field says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

import tasks
from instep import Task  # noqa: F401 - what a file of a Task usually imports

Ending = Literal["well", "crash", "diverge", "memory", "hang"]


@dataclass(kw_only=True)
class Faulty(tasks.Small):
    """A small classifier, and ways to fail."""

    ending: Ending = "well"
    extra: float | None = None

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
class Conditional(tasks.Small):
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
