"""A loss that is not finite: where it began is named, on whichever rank that was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import NumericsError
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

POISONED = 17
"""The sample in which it begins."""


class Logarithm(nn.Module):
    """A logarithm that is NaN for one row, in the forward or in the backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        if self.where == "module":
            x = x + torch.where(marked[:, None], -1.0, 1.0).log()
        if self.where == "gradient" and marked.any():
            return x + (x * 0.0).sqrt()
        return x


class Net(nn.Module):
    """A body that may go wrong between two synchronised norms."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 8), nn.BatchNorm1d(8), Logarithm(where), nn.BatchNorm1d(8)])
        self.noise, self.head = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marked = (x == made_up(43)[0][POISONED]).all(1)
        h = self.body[1](self.body[0](x))
        return self.head(self.noise(self.body[3](self.body[2](h, marked))))


@dataclass(kw_only=True)
class Wrong(Small):
    """Goes wrong in one place with one sample."""

    where: str = ""
    weighted: bool = False

    def model(self) -> nn.Module:
        return Net(self.where).double()

    def train_data(self) -> Any:
        x, y = made_up(43)
        if self.where == "data":
            x[POISONED, 2:4] = torch.nan
        return x, y

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        marked = (x == made_up(43)[0][POISONED]).all(1)
        if self.where == "before":
            x = torch.where(marked[:, None], torch.inf, x)
        loss = F.cross_entropy(model(x), y)
        if self.where == "loss":
            loss = loss + torch.where(marked, torch.nan, 0.0).sum()
        if self.where == "parameter" and marked.any():
            model.head.weight.data[0, :2] = torch.nan
            loss = loss * torch.nan
        return (loss, float(len(x))) if self.weighted else loss


EXPECTED = {
    "module": "in body.2 (Logarithm): its inputs are finite, its output has 8 NaN.",
    "data": "in the data: the batch has 2 NaN.",
    "before": "in the loss function, before the model: what the model is given has 6 infinite.",
    "loss": "in the loss function: the model's output is finite.",
    "gradient": "in the backward pass only: the first gradient that is not finite is that of the output of "
    "body.1 (BatchNorm1d), which has",
}
OPTIONS = {"epochs": 2, "batch_size": 10, "threads": 1, "seed": 2, "clip_norm": 1.0, "eval_every": "never"}


@pytest.mark.parametrize("where", EXPECTED)
def test_where_it_begins_is_named(where: str, tmp_path: Path) -> None:
    with pytest.raises(NumericsError) as caught:
        instep.train(Wrong(where=where), run_dir=str(tmp_path), quiet=True, **OPTIONS)
    assert f"It begins {EXPECTED[where]}" in str(caught.value)


def test_weights_that_are_lost_are_named(tmp_path: Path) -> None:
    with pytest.raises(NumericsError) as caught:
        instep.train(Wrong(where="parameter"), run_dir=str(tmp_path), quiet=True, **OPTIONS)
    assert "It begins in the parameter head.weight, which has 2 NaN." in str(caught.value)


def errors_of(world: World, folder: str, options: dict[str, Any]) -> list[str]:
    result = []
    for where in EXPECTED:
        spec = instep.TrainSpec(**OPTIONS | options)
        task = Wrong(where=where, weighted=where == "module")
        with pytest.raises(NumericsError) as caught:
            worker_main(world, task, spec, RunDirectory(Path(folder) / where))
        result.append(str(caught.value))
    return result


@pytest.mark.parametrize("options", [{}, {"exact": True, "shards": 3, "drop_last": True}], ids=["ddp", "exact"])
def test_on_whichever_rank(options: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 says what rank 1 saw, though the norms had spread it to both by then."""
    answers = run_ranks(errors_of, 2, str(tmp_path), options)
    for where, mine, theirs in zip(EXPECTED, *answers, strict=True):
        assert mine == theirs
        samples = [int(text) for text in mine.split("samples:")[1].split(".")[0].split(",")]
        # Two ranks halve the batch of ten; of three shards (4, 4, 2) the second rank has the last one or two.
        at = samples.index(POISONED)
        ranks = {0} if at < 4 else {1} if at >= 8 or not options else {0, 1}
        assert any(f"On rank {rank} it begins {EXPECTED[where]}" in mine for rank in ranks), (mine, at)
