"""Fused optimizers: chosen where nobody else has, and changed without harm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.train.optimizer import can_fuse, set_fused
from instep.train.worker import worker_main
from instep.world.world import World
from tasks import Small

MAKE: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


@dataclass(kw_only=True)
class Chosen(Small):
    optimizer_name: str = "adamw"
    fused: bool | None = None

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        self.made = MAKE[self.optimizer_name](params, lr=0.01, fused=self.fused)
        return self.made


def train(task: Any, run_dir: Path, steps: int, **options: Any) -> float:
    spec = TrainSpec(**{"steps": steps, "batch_size": 12, "threads": 1, "eval_every": "never"} | options)
    return worker_main(World.join(Place()), task, spec, RunDirectory(run_dir)).loss


@pytest.mark.parametrize("name", MAKE)
def test_chosen_in_normal_mode_only_and_only_if_left_open(name: str, tmp_path: Path) -> None:
    for number, (fused, options, expected) in enumerate(
        [(None, {}, True), (None, {"exact": True, "shards": 3, "drop_last": True}, None), (False, {}, False)]
    ):
        task = Chosen(optimizer_name=name, fused=fused)
        train(task, tmp_path / str(number), 1, **options)
        assert [group["fused"] for group in task.made.param_groups] == [expected]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("order", [(False, None), (None, False)])
def test_a_run_goes_on_in_another_form(order: tuple[Any, Any], name: str, tmp_path: Path) -> None:
    whole = train(Chosen(optimizer_name=name), tmp_path / "whole", 14)
    train(Chosen(optimizer_name=name, fused=order[0]), tmp_path / "parts", 7)
    task = Chosen(optimizer_name=name, fused=order[1])
    assert train(task, tmp_path / "parts", 14) == pytest.approx(whole, rel=1e-9)
    if order[1] is None:
        assert task.made.param_groups[0]["fused"] is True


def test_the_count_of_steps_follows_the_form() -> None:
    """On one device nothing would move; on `meta` it shows."""
    p = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([p])
    optimizer.state[p]["step"] = torch.tensor(4.0)
    set_fused(optimizer, True)
    assert optimizer.state[p]["step"].device.type == "meta"
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([p], fused=True)
    optimizer.state[p]["step"] = torch.tensor(4.0, dtype=torch.float32)
    set_fused(optimizer, False)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.state[p]["step"].item() == 4.0


class Own(torch.optim.Adam):
    """A subclass may do anything."""


def test_what_is_left_alone() -> None:
    p, complex_p = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    assert can_fuse(Own([p])) is None
    assert can_fuse(torch.optim.RMSprop([p])) is None
    assert can_fuse(torch.optim.Adam([p], foreach=True)) is None
    assert can_fuse(torch.optim.SGD([{"params": [p], "fused": False}], lr=0.1)) is None
    assert can_fuse(torch.optim.SGD([p], lr=0.1))
    assert can_fuse(torch.optim.SGD([p], lr=0.1, momentum=0.9)) is False
    assert can_fuse(torch.optim.Adam([p, complex_p])) is False
    assert can_fuse(torch.optim.Adam([nn.Parameter(torch.zeros(3, device="meta"))])) is False


@dataclass(kw_only=True)
class Sparse(Chosen):
    """A table of which a step uses few rows: no fused form takes its gradient."""

    optimizer_name: str = "sgd"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 3, sparse=True, dtype=torch.float64), nn.Flatten())

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model((x[:, 0].abs() * 10).long()), y)

    def eval_data(self) -> Any:
        return None


@dataclass(kw_only=True)
class LateSparse(Sparse):
    """Uses its embedding from the second step on."""

    calls: int = 0

    def model(self) -> nn.Module:
        return nn.ModuleDict({"late": super().model(), "early": nn.Linear(6, 3, dtype=torch.float64)})

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        x, y = batch
        result = model["early"](x)
        return F.cross_entropy(result if self.calls == 1 else result + model["late"]((x[:, 0].abs() * 10).long()), y)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_layer_that_is_used_late(tmp_path: Path) -> None:
    assert train(LateSparse(), tmp_path, 4) > 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_are_taken_as_before(name: str, tmp_path: Path) -> None:
    task = Sparse(optimizer_name=name)
    result = train(task, tmp_path / "a", 6)
    assert task.made.param_groups[0]["fused"] is None
    assert result == train(Sparse(optimizer_name=name, fused=False), tmp_path / "b", 6)
