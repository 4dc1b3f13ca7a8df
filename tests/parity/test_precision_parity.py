"""bf16 and fp16: the same answer on several processes, skipped steps and all; in exact mode the same bits."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.task import Task
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from recipes import made_up

STEPS = 20
TOLERANCE = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""A part's gradient of a weight is rounded once, to half of this; another split rounds other parts. Relative to the
loss that is an upper limit: an update moves it by a fraction of itself."""


@dataclass(kw_only=True)
class Task16(Task):
    """A classifier; the loss of one sample, or of all, may be so large that its gradient overflows float16."""

    boosted: int | None = None
    boost: float = 1e5
    weighted: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(36, 24),
            nn.LayerNorm(24),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(24, 12),
            nn.ReLU(),
            nn.Linear(12, 5),
        )

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=2e-3)

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    def train_data(self) -> Any:
        return made_up(50, torch.float32, seed=1)

    def loss(self, model: Any, batch: Any) -> Any:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") / 8
        if self.boosted is not None:
            each = torch.where(batch["index"] == self.boosted, each * self.boost, each)
        return (each.mean(), torch.tensor(float(len(each) * 300))) if self.weighted else each.mean()


def train(world: World, task: Task16, run_dir: str, steps: int, **options: Any) -> dict[str, Any]:
    spec = TrainSpec(
        **{"steps": steps, "batch_size": 8, "save_every": "never", "eval_every": "never", "threads": 1, "seed": 5}
        | options
    )
    with process_settings(spec, world.world_size):
        result = worker_main(world, task, spec, RunDirectory(Path(run_dir)))
    world.barrier()
    records = [e for e in read_events(Path(run_dir)) if e["event"] == "step"]
    directory = RunDirectory(Path(run_dir))
    progress = Checkpoint(directory.checkpoints / directory.names()[0]).part("progress")
    world.barrier()
    return {
        "losses": [e["loss"] for e in records],
        "skipped": [e["step"] for e in records if e.get("skipped")],
        "scale": dict(progress).get("loss_scale"),
        "sha256": result.weights_sha256,
    }


CASES: dict[str, tuple[Task16, dict[str, Any]]] = {
    "bf16": (Task16(), {"precision": "bf16"}),
    "bf16-accumulated": (Task16(), {"precision": "bf16", "batch_size": 13, "accumulate": 3}),
    "fp16": (Task16(), {"precision": "fp16"}),
    "fp16-overflow": (Task16(boosted=17), {"precision": "fp16"}),
    "fp16-overflow-clip": (Task16(boosted=17), {"precision": "fp16", "clip_norm": 0.05}),
    "fp16-weighted": (Task16(weighted=True), {"precision": "fp16"}),
    "exact-bf16": (Task16(), {"precision": "bf16", "exact": True, "shards": 6, "batch_size": 13}),
    "exact-fp16": (Task16(boosted=17), {"precision": "fp16", "exact": True, "shards": 6, "batch_size": 13}),
}
NORMAL = [name for name in CASES if not name.startswith("exact")]
EXACT = [name for name in CASES if name.startswith("exact")]


def train_all(world: World, names: list[str]) -> dict[str, dict[str, Any]]:
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = world.broadcast_object(scratch)
        for name in names:
            task, options = CASES[name]
            results[name] = train(world, task, f"{folder}/{name}", STEPS, **options)
        world.barrier()
    return results


@functools.cache
def alone() -> dict[str, dict[str, Any]]:
    return train_all(World.join(Place()), list(CASES))


@functools.cache
def together(world_size: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_all, world_size, EXACT if world_size == 3 else list(CASES))


@pytest.mark.parametrize("name", NORMAL)
def test_two_processes_give_the_answer_of_one(name: str) -> None:
    expected, actual = alone()[name], together(2)[0][name]
    differences = [abs(a / b - 1) for a, b in zip(actual["losses"], expected["losses"], strict=True)]
    print(name, max(differences), expected["skipped"], expected["scale"])
    assert max(differences) < TOLERANCE[name.split("-")[0]]
    assert actual["skipped"] == expected["skipped"]
    assert actual["scale"] == expected["scale"]
    assert together(2)[1][name] == actual  # and both ranks hold the same


SPREAD = {
    "fsdp": ["bf16", "bf16-accumulated", "fp16", "fp16-overflow", "fp16-overflow-clip", "fp16-weighted"],
    "tensor": ["bf16", "fp16-overflow"],
    "pipeline": ["bf16", "fp16-overflow"],
    "narrow": ["bf16", "fp16-overflow"],
}


def train_spread(world: World) -> dict[str, dict[str, dict[str, Any]]]:
    """Train on two processes under all strategies, in one launch."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = world.broadcast_object(scratch)
        for way, names in SPREAD.items():
            results[way] = {}
            more = {"strategy": "fsdp", "narrow_gather": True} if way == "narrow" else {"strategy": way}
            for name in names:
                task, options = CASES[name]
                results[way][name] = train(world, task, f"{folder}/{way}-{name}", STEPS, **{**options, **more})
        world.barrier()
    return results


@functools.cache
def spread() -> list[dict[str, dict[str, dict[str, Any]]]]:
    return run_ranks(train_spread, 2, timeout_s=100)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("way", "name"), [(way, name) for way, names in SPREAD.items() for name in names])
def test_a_model_that_is_spread_gives_the_answer_of_one(way: str, name: str) -> None:
    expected, actual = alone()[name], spread()[0][way][name]
    differences = [abs(a / b - 1) for a, b in zip(actual["losses"], expected["losses"], strict=True)]
    print(way, name, max(differences))
    # Rounded weights are as far off as rounded activations, in every layer.
    assert max(differences) < TOLERANCE[name.split("-")[0]] * (3 if way == "narrow" else 1)
    assert actual["skipped"] == expected["skipped"]
    assert actual["scale"] == expected["scale"]
    assert spread()[1][way][name] == actual


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_exact_mode_gives_the_bits_of_one(name: str, world_size: int) -> None:
    assert together(world_size)[0][name] == alone()[name]
    assert len(set(alone()[name]["losses"])) == STEPS  # it does train


def test_a_step_that_overflows_is_skipped_and_halves_the_scale() -> None:
    for name in ("fp16-overflow", "fp16-overflow-clip"):
        actual = alone()[name]
        num = len(actual["skipped"])
        assert num == 3  # once an epoch of 7 steps
        assert actual["scale"]["value"] == 2.0 ** (16 - num)
        assert actual["scale"]["num_skipped"] == num
    assert alone()["fp16"]["skipped"] == []
    assert alone()["fp16"]["scale"]["num_good"] == STEPS
    assert alone()["bf16"]["scale"] is None


def test_weights_cost_at_most_the_first_step() -> None:
    actual = alone()["fp16-weighted"]
    assert actual["skipped"] in ([], [1])
    assert actual["scale"]["value"] == 2.0**16
    late = len(actual["skipped"])
    assert actual["losses"] == pytest.approx(alone()["fp16"]["losses"], rel=0.05 * late + 0.001)


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_is_continued_has_the_scale_it_had(exact: bool, tmp_path: Path) -> None:
    world, options = World.join(Place()), {"precision": "fp16", "exact": exact}
    task = Task16(boosted=17)
    whole = train(world, task, str(tmp_path / "whole"), 20, **options)
    first = train(world, task, str(tmp_path / "parts"), 11, **options)
    assert first["skipped"]
    then = train(world, task, str(tmp_path / "parts"), 20, **options)
    assert then["sha256"] == whole["sha256"]
    assert then["scale"] == whole["scale"]
    assert then["skipped"] == whole["skipped"]


def test_overflow_in_the_first_steps_is_only_a_notice(tmp_path: Path) -> None:
    """The schedule goes on, without torch's warning about an update that it misses."""
    task = Task16(boosted=None)
    task.loss = lambda model, batch: 3e3 * Task16.loss(task, model, batch)  # type: ignore[method-assign]
    actual = train(World.join(Place()), task, str(tmp_path), 20, precision="fp16")
    assert actual["skipped"][:5] == [1, 2, 3, 4, 5]
    assert len(actual["skipped"]) < 15
    notices = [e["text"] for e in read_events(tmp_path) if e["event"] == "notice"]
    assert len([text for text in notices if "step 1 overflowed" in text]) == 1
    assert len(notices) <= 3


class Rooted(Task16):
    """A gradient that is NaN at any scale."""

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch) + (model(batch["x"])[0, 0].float() * 0.0).sqrt()


def test_a_gradient_that_is_nan_at_any_scale_is_no_overflow_for_ever(tmp_path: Path) -> None:
    from instep.core.errors import NumericsError

    with pytest.raises(NumericsError, match="the gradient of step 33 is not finite"):
        train(World.join(Place()), Rooted(), str(tmp_path), 40, precision="fp16")
