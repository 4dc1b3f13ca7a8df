"""Tasks whose checkpoints are evaluated, and predict; loaded by their file, as a run's are."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import instep


class Shade(Enum):
    DARK = 1
    LIGHT = 2


def numbers(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def two_samples() -> Any:
    """Fewer than ranks."""
    return numbers(2, 3)


@dataclass(kw_only=True)
class Plain(instep.Task):
    """Without `predict`."""

    widths: list[int] = field(default_factory=lambda: [8, 4])
    shade: Shade = Shade.DARK
    where: Path | None = None
    num_eval: int = 23

    def model(self) -> nn.Module:
        first, *rest = self.widths
        layers = [nn.Linear(6, first)]
        for width in rest:
            layers += [nn.ReLU(), nn.Linear(first, width)]
            first = width
        return nn.Sequential(*layers, nn.Dropout(0.5))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def train_data(self) -> Any:
        return numbers(40, 1)

    def eval_data(self) -> Any:
        return numbers(self.num_eval, 2)

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"accuracy": model(batch[0]).argmax(1) == batch[1]}


@dataclass(kw_only=True)
class Named(Plain):
    """Several columns, of several kinds; `odd` returns something that cannot be written."""

    odd: str = ""
    dies: str = ""
    """A file: where it is not there, rank 1 makes it, and is killed."""

    def predict(self, model: Any, batch: Any) -> Any:
        x, y = batch
        scores = model(x)
        length = 2 + int(y[0]) % 2
        if self.dies and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            try:
                os.close(os.open(self.dies, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        if self.odd == "raises" and length == 3:
            raise ZeroDivisionError("in predict")
        others: dict[str, Any] = {
            "rows": {"label": scores[:1]},
            "mean": scores.mean(),
            "tuple": (scores, scores),
            "index": {"index": scores},
            "dtype": {"label": scores.argmax(1) if length == 2 else scores[:, 0]},
            "names": {"label": y} if length == 2 else {"klass": y},
            "nothing": {},
            "ragged": {"tokens": y[:, None].expand(-1, length)},
        }
        return (
            others[self.odd]
            if self.odd in others
            else {
                "label": scores.argmax(1),
                "scores": scores.reshape(len(y), 2, 2),
                "half": scores[:, 0].bfloat16(),
                "sure": scores.amax(1) > 1,
                "name": [f"klass {int(label)} é" for label in y],
            }
        )


@dataclass(kw_only=True)
class TwoSets(Plain):
    def eval_data(self) -> Any:
        return {"clean": numbers(9, 4), "noisy": numbers(5, 5)}


class Total(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum(0)


class Summed(Plain):
    """Its model returns no rows."""

    def model(self) -> nn.Module:
        return Total(6, 4)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).square().mean() / len(batch[1])

    def metrics(self, model: Any, batch: Any) -> Any:
        return {}


class Remembers(Named):
    """Has state of its own in a checkpoint."""

    offset = 0.0

    def on_step(self, record: Any) -> None:
        self.offset += 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"offset": torch.tensor(self.offset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset = float(state["offset"])

    def predict(self, model: Any, batch: Any) -> Any:
        return torch.full((len(batch[1]),), self.offset)
