"""Recomputed blocks: the same gradients, masks and statistics, to the bit."""

from __future__ import annotations

import copy
import functools
import tempfile
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
from instep.events.read import read_events
from instep.parallel.batch_context import BatchContext
from instep.parallel.recompute import recompute_blocks
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

PASSES = {"count": 0}


class Block(nn.Module):
    """All that a second pass might do otherwise: dropout by row, used twice, torch's own noise, statistics, buffers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("constant", torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        PASSES["count"] += torch.is_grad_enabled()
        if self.training:
            self.calls = self.calls + 1
            self.average.lerp_(x.detach().mean(0), 0.1)
        y = self.drop(self.norm(self.inner(x - self.average)).tanh() * self.constant) * (1 + 0.01 * self.calls)
        return x + F.dropout(self.drop(y), 0.1, self.training) * scale


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.9)
        return self.head(x)


@dataclass(kw_only=True)
class Deep(Small):
    norm: bool = True
    dtype: torch.dtype = torch.float64
    weighted: bool = False

    def model(self) -> nn.Module:
        return Net(self.norm).to(self.dtype)

    def sync_buffers(self) -> dict[str, str]:
        return {"blocks.*.average": "mean"}

    def train_data(self) -> Any:
        return made_up(self.num_samples, dtype=self.dtype)

    def eval_data(self) -> Any:
        return made_up(23, seed=2, dtype=self.dtype)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        mask = (y != 0).to(each)
        return ((each * mask).sum() / mask.sum(), mask.sum()) if self.weighted else each.mean()


CASES: dict[str, tuple[Deep, dict[str, Any]]] = {
    "plain": (Deep(), {}),
    "accumulated": (Deep(), {"accumulate": 2}),
    "weighted": (Deep(weighted=True), {"batch_size": 5}),
    "exact": (Deep(), {"exact": True, "shards": 4, "drop_last": True}),
    "bf16": (Deep(dtype=torch.float32), {"precision": "bf16"}),
}


def train(world: World, recompute: bool) -> dict[str, Any]:
    actual = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(world.broadcast_object(scratch))
        for name, (task, options) in CASES.items():
            spec = TrainSpec(
                **{"steps": 5, "batch_size": 12, "threads": 1, "eval_every": "3", "recompute": recompute} | options
            )
            PASSES["count"] = 0
            with process_settings(spec, world.world_size):
                result = worker_main(world, task, spec, RunDirectory(folder / name))
            world.barrier()
            events = read_events(folder / name)
            actual[name] = {
                "sha256": result.weights_sha256,
                "metrics": result.metrics,
                "losses": [e["loss"] for e in events if e["event"] == "step"],
                "notices": [e["text"] for e in events if e["event"] == "notice" and "BatchNorm" not in e["text"]],
                "passes": PASSES["count"],
            }
            world.barrier()
    return actual


@functools.cache
def trained(world_size: int, recompute: bool) -> dict[str, Any]:
    if world_size == 1:
        return train(World.join(Place()), recompute)
    return run_ranks(train, world_size, recompute)[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_pass(name: str, world_size: int) -> None:
    once, twice = trained(world_size, False)[name], trained(world_size, True)[name]
    for what in ("sha256", "losses", "metrics"):
        assert once[what] == twice[what], what
    assert twice["passes"] == 2 * once["passes"] > 0
    assert any("recomputing 3 Block" in text for text in twice["notices"])


def test_exact_mode_has_the_bits_of_one_process() -> None:
    assert trained(1, True)["exact"]["sha256"] == trained(2, True)["exact"]["sha256"]


def test_modules_stay_what_they_are() -> None:
    torch.manual_seed(0)
    model = Net(norm=True)
    before, context = copy.deepcopy(model), BatchContext(torch.device("cpu"), seed=1)
    assert recompute_blocks(model, context) == "3 Block"
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(isinstance(block, Block) for block in model.blocks)
    x = torch.randn(4, 6)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each.eval()(x), before.eval()(x))
        loss = each(x).sum()
        PASSES["count"] = 0
        loss.backward(retain_graph=True)
        loss.backward()  # as often as asked for
        assert PASSES["count"] == 6


def test_what_has_no_blocks_is_told(tmp_path: Path) -> None:
    spec = TrainSpec(steps=1, batch_size=12, threads=1, recompute=True)
    worker_main(World.join(Place()), Small(), spec, RunDirectory(tmp_path))
    notices = [e["text"] for e in read_events(tmp_path) if e["event"] == "notice"]
    assert notices == ["recompute: the model has no repeated blocks, so nothing is computed twice."]
