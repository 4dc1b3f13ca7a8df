"""Tasks for finders: with a limit of memory that is planted, and with learning rates that are set in several ways."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F

import instep
from tasks import made_up


@dataclass(kw_only=True)
class Plain(instep.Task):
    """A small classifier without BatchNorm."""

    lr: float = 0.05
    num_samples: int = 400

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.lr)

    def train_data(self) -> Any:
        x, _ = made_up(self.num_samples)
        return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)


@dataclass(kw_only=True)
class Limited(Plain):
    """Memory runs out above so many rows; `only` says on which rank, if not on all."""

    limit: int = 11
    only: int = -1

    def loss(self, model: Any, batch: Any) -> Any:
        from instep.world.world import place_here

        if len(batch[0]) > self.limit and self.only in (-1, place_here().rank):
            raise torch.OutOfMemoryError(f"planted: {len(batch[0])} rows")
        return super().loss(model, batch)


@dataclass(kw_only=True)
class Hungry(Plain):
    """Each row takes 4 MiB on its way through the model; the process may grow by so many."""

    room_mib: int = 800

    def model(self) -> nn.Module:
        room = psutil.Process().memory_info().vms + (self.room_mib << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        return nn.Sequential(nn.Linear(6, 1 << 18), nn.Tanh(), nn.Linear(1 << 18, 3))

    def train_data(self) -> Any:
        x, y = super().train_data()
        return x.float(), y


@dataclass(kw_only=True)
class Hidden(Plain):
    """Its learning rate is not a field."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


@dataclass(kw_only=True)
class Scaled(Plain):
    """Its learning rate is proportional to a field, which has another value."""

    beta: float = 0.9
    lr_of_256: float = 0.2
    batch: int = 64

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        lr = self.lr_of_256 * (self.batch / 256) ** 0.5
        return torch.optim.Adam(params, lr=lr, betas=(self.beta, 0.999))


@dataclass(kw_only=True)
class Zero(Plain):
    """Its optimizer has no learning rate that could be multiplied."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)).double()


@dataclass(kw_only=True)
class Held(Plain):
    """Its model is made once, and held by the Task: a training in this process would change it."""

    net: nn.Module = field(default_factory=_net, init=False)

    def model(self) -> nn.Module:
        torch.manual_seed(1)  # the weights of an object made in another process
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn_like(p) / 3)
        return self.net


@dataclass(kw_only=True)
class Broken(Plain):
    """Its loss fails, and not because of memory."""

    def loss(self, model: Any, batch: Any) -> Any:
        raise ValueError("no rows today")


@dataclass(kw_only=True)
class HungryOnGpu(Plain):
    """Each row takes 4 MiB of a GPU, of which the process may take so many."""

    room_mib: int = 4000

    def model(self) -> nn.Module:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((self.room_mib << 20) / whole)
        return nn.Sequential(nn.Linear(6, 1 << 19), nn.Tanh(), nn.Linear(1 << 19, 3))

    def train_data(self) -> Any:
        x, y = super().train_data()
        return x.float(), y
