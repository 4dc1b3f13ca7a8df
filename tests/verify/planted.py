"""Tasks with a mistake each that shows only at another number of processes, or after a resume; and one without."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import instep


def rank() -> int:
    return int(os.environ["RANK"])


@dataclass(kw_only=True)
class Sound(instep.Task):
    """Nothing wrong: dropout, BatchNorm, a schedule, state that is checkpointed."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_steps)

    def train_data(self) -> Any:
        return made_up(100, seed=1)

    def eval_data(self) -> Any:
        return made_up(30, seed=2)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}


@dataclass(kw_only=True)
class ByTokens(Sound):
    """Rows of different lengths, to be read in batches of so many tokens; nothing wrong."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.1), nn.Linear(4, 8))

    def train_data(self) -> Any:
        lengths = [2 + i * 37 % 19 for i in range(100)]
        return instep.data.bucketed([torch.arange(length) % 7 + 1 for length in lengths], lengths)

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: Any, batch: Any) -> Any:
        known = batch[:, 1:] != 0
        losses = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")
        return (losses * known).sum() / known.sum().clamp(min=1), float(known.sum())


def made_up(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)


@dataclass(kw_only=True)
class SummedLoss(Sound):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum")


@dataclass(kw_only=True)
class RankNoise(Sound):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        own = torch.Generator().manual_seed(1000 * rank() + int(y.sum()))
        return F.cross_entropy(model(x + 0.01 * torch.randn(x.shape, generator=own, dtype=x.dtype)), y)


class ProcessItems(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        x, y = made_up(100, seed=1)
        # Not modulo something: processes that follow one another must stay close, as their twins are.
        return x[index] * (1 + 1e-6 * os.getpid()), y[index]


@dataclass(kw_only=True)
class ItemsOfTheProcess(Sound):
    def train_data(self) -> Any:
        return ProcessItems()


class OwnNorm(nn.Module):
    """Batch statistics by hand: nobody can synchronise what nobody knows of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


@dataclass(kw_only=True)
class UnsyncedNorm(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), OwnNorm(), nn.ReLU(), nn.Linear(16, 3))


class Clocked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + time.time() % 1)  # large: two moments are not alike by chance


@dataclass(kw_only=True)
class TimeInForward(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(Clocked(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Ranked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.001 * rank())


@dataclass(kw_only=True)
class RankInForward(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(Ranked(8, 16), nn.ReLU(), nn.Linear(16, 3))


@dataclass(kw_only=True)
class HiddenState(Sound):
    """Warms its loss up by a counter that no checkpoint knows."""

    def loss(self, model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return super().loss(model, batch) * (1 + 0.1 * self.__dict__.get("calls", 0))


@dataclass(kw_only=True)
class LocalSchedule(Sound):
    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        world_size = int(os.environ["WORLD_SIZE"])
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step * world_size))


class Counting(nn.Linear):
    """A buffer that follows the local rows."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("average", torch.zeros(sizes[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.average)


@dataclass(kw_only=True)
class LocalBuffer(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(Counting(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Everything(nn.Sequential):
    """Statistics and a buffer of the local rows, noise of the rank, the time."""

    def __init__(self) -> None:
        super().__init__(Counting(8, 16), OwnNorm(), Clocked(16, 16), nn.ReLU(), Ranked(16, 3))


@dataclass(kw_only=True)
class EveryMistake(LocalSchedule):
    """All mistakes of this file at once: no row of the comparison is right."""

    def model(self) -> nn.Module:
        return Everything()

    def train_data(self) -> Any:
        return ProcessItems()

    def eval_data(self) -> Any:
        return made_up(30 + int(os.environ["WORLD_SIZE"]), seed=2)
