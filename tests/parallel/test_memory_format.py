"""Weights in channels_last give the same answer, on several ranks and after a checkpoint, with fused optimizers."""

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
from instep.core.spec import TrainSpec
from instep.train.precision import Precision
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks


@dataclass(kw_only=True)
class Images(instep.Task):
    own_format: bool = False

    def model(self) -> nn.Module:
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 9 * 9, 5))
        return model.to(memory_format=torch.channels_last) if self.own_format else model

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, fused=True)

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(40, 3, 6, 6, generator=generator), torch.randint(5, (40,), generator=generator)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.formats = {p.stride(1) == 1 for p in model.parameters() if p.dim() == 4}
        return F.cross_entropy(model(batch[0]), batch[1])


def train(world: World, run_dir: str, by: str) -> list[float]:
    """Train, continue from the checkpoint, and return the losses; `by` whom the format is chosen."""
    if by == "instep":
        Precision.prefers_channels_last = property(lambda _: True)  # type: ignore[method-assign,assignment]
    losses = []
    for steps in (4, 8):
        spec = TrainSpec(batch_size=10, steps=steps, save_every="never", seed=3)
        task = Images(own_format=by == "user")
        losses.append(worker_main(world, task, spec, RunDirectory(Path(run_dir))).loss)
        assert task.formats == {by != "nobody"}
    return losses


@pytest.mark.parametrize("by", ["user", "instep"])
def test_the_same_answer(by: str, tmp_path: Path) -> None:
    contiguous = run_ranks(train, 1, str(tmp_path / "contiguous"), "nobody")[0]
    for world_size in (1, 2):
        losses = run_ranks(train, world_size, str(tmp_path / str(world_size)), by)[0]
        assert losses == pytest.approx(contiguous, rel=1e-4)


@pytest.mark.parametrize(
    ("device", "precision", "prefers"), [("cuda", "bf16", True), ("cuda", "fp32", False), ("cpu", "bf16", False)]
)
def test_where_it_pays(device: str, precision: str, prefers: bool) -> None:
    assert Precision(TrainSpec(precision=precision), torch.device(device)).prefers_channels_last == prefers
