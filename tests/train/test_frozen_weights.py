"""Checkpoints without frozen weights that came from another run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

pytestmark = pytest.mark.timeout(60)


class Net(nn.Module):
    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.base.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x).relu())


@dataclass(kw_only=True)
class Tuned(instep.Task):
    is_frozen: bool = True

    def model(self) -> nn.Module:
        return Net(self.is_frozen)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def train_data(self) -> Any:
        return TensorDataset(torch.arange(24.0).view(8, 3) / 24)

    eval_data = train_data

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().mean()


def train(folder: Path, is_frozen: bool = True, **more: Any) -> instep.Result:
    options: dict[str, Any] = {"steps": 2, "batch_size": 4, "quiet": True, "threads": 1, **more}
    return instep.train(Tuned(is_frozen=is_frozen), run_dir=str(folder), **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    train(folder, is_frozen=False, seed=5)
    return folder


def test_a_run_with_whole_checkpoints_continues_without_saving_frozen_weights(base: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", init_from=str(base))
    continued = train(tmp_path / "run", init_from=str(base), save_frozen=False, steps=4)
    assert instep.evaluate(continued.run_dir, task=Tuned(), quiet=True).metrics == continued.metrics
    assert torch.equal(continued.load_model().base.weight, instep.load_model(Tuned(), base).base.weight)
    again = train(tmp_path / "run", init_from=str(base), save_frozen=False, steps=6)
    assert again.weights_sha256 == train(tmp_path / "whole", init_from=str(base), steps=6).weights_sha256


@pytest.mark.parametrize("is_frozen", [True, False])
def test_weights_of_a_run_bring_the_base_that_it_left_out(is_frozen: bool, base: Path, tmp_path: Path) -> None:
    tuned = train(tmp_path / "tuned", init_from=str(base), save_frozen=False, ema=0.9)
    more = {"save_frozen": False, "lr_schedule": "constant", "seed": 7}
    third = train(tmp_path / "third", is_frozen, init_from=tuned.run_dir, **more)
    first = instep.load_model(Tuned(), base).base.weight
    assert torch.equal(third.load_model().base.weight, first) is is_frozen
