"""Learning rates and the end of a run that follow a metric: the same at any world size, and after a kill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, SpecError, TaskError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.directory import prepare_directory
from instep.train.lr_schedule import factor_at
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks

PER_EPOCH = 3
LR = 0.5


@dataclass(kw_only=True)
class Overfits(instep.Task):
    """Its evaluation gets better for some epochs, and then worse."""

    schedule: str = ""
    sets: bool = False
    dies_at: int = 0

    def model(self) -> nn.Module:
        return nn.Linear(2, 1, bias=False).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=LR)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        del num_steps
        return {
            "": None,
            "plateau": ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
            "most": ReduceLROnPlateau(optimizer, "max"),
            "epochs": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"},
            "hours": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "hour"},
        }[self.schedule]

    def train_data(self) -> Any:
        x = torch.randn(22, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        return x, x @ torch.tensor([1.0, 3.0], dtype=torch.float64)

    def eval_data(self) -> Any:
        x, y = self.train_data()
        other = x, x @ torch.tensor([0.7, 1.0], dtype=torch.float64)
        return {"same": (x, y), "other": other} if self.sets else other

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch[0])[:, 0] - batch[1]).square().mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"closeness": -(model(batch[0])[:, 0] - batch[1]).abs()}

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


class Plain(Overfits):
    """Without a scheduler of its own."""

    scheduler = instep.Task.scheduler


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Train; return how many steps were made, the weights, the learning rate of each step, and the metrics."""
    spec = TrainSpec(**{"batch_size": 8, "epochs": 12, "seed": 5, "save_every": "never", **options})
    cls = Plain if "lr_schedule" in options else Overfits
    result = worker_main(world, cls(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    rates = {event["step"]: event["lr"] for event in read_events(Path(run_dir)) if event["event"] == "step"}
    return result.steps, result.weights_sha256, list(rates.values()), result.metrics


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patience": ({"stop_when": "eval_loss:min", "patience": 2}, {}),
    "patience, more is better": ({"stop_when": "closeness", "patience": 1}, {}),
    "patience by one of several sets": ({"stop_when": "other/eval_loss:min", "patience": 2}, {"sets": True}),
    "plateau": ({}, {"schedule": "plateau"}),
    "plateau by a metric that is named": ({"keep_best": "eval_loss:min"}, {"schedule": "plateau"}),
    "by epochs": ({"epochs": 3}, {"schedule": "epochs"}),
    "cosine": ({"lr_schedule": "cosine", "warmup": 4, "epochs": 4}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_at_any_world_size_and_after_a_kill(case: str, tmp_path: Path) -> None:
    options, fields = CASES[case]
    options = {**options, "exact": True, "shards": 4}
    expected = run_ranks(train, 1, str(tmp_path / "1"), options, fields)[0]
    steps, _, rates, metrics = expected
    assert ("other/closeness" in metrics) is ("same/eval_loss" in metrics) is fields.get("sets", False)
    if "stop_when" in options:
        assert 3 * PER_EPOCH <= steps < 12 * PER_EPOCH
    if fields.get("schedule") == "plateau":
        assert len(set(rates)) > 2
    for world_size in (2, 3):
        assert run_ranks(train, world_size, str(tmp_path / str(world_size)), options, fields)[0] == expected
    with pytest.raises(KeyboardInterrupt):
        train(World.join(Place()), str(tmp_path / "killed"), {**options, "save_every": "1"}, {**fields, "dies_at": 8})
    assert train(World.join(Place()), str(tmp_path / "killed"), {**options, "save_every": "1"}, fields) == expected


def test_why_it_stopped(tmp_path: Path) -> None:
    train(World.join(Place()), str(tmp_path), {"stop_when": "eval_loss:min", "patience": 2}, {})
    texts = [event["text"] for event in read_events(tmp_path) if event["event"] == "notice"]
    assert any("eval_loss has not been better than " in text and "for 2 evaluations" in text for text in texts), texts
    assert read_events(tmp_path)[-1]["stopped"] is True


def test_rates_by_epoch(tmp_path: Path) -> None:
    _, _, rates, _ = train(World.join(Place()), str(tmp_path), {"epochs": 3}, {"schedule": "epochs"})
    assert rates == [LR] * PER_EPOCH + [LR / 2] * PER_EPOCH + [LR / 4] * PER_EPOCH


def test_a_checkpoint_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    train(World.join(Place()), str(tmp_path), {"epochs": 3, "save_every": "1epoch"}, {})
    assert RunDirectory(tmp_path).names() == [f"step-{step:08d}" for step in (9, 6, 3)]


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 50), st.integers(1, 200))
def test_factors(name: str, warmup: int, num_steps: int) -> None:
    factors = [factor_at(name, warmup, num_steps, step) for step in range(num_steps)]
    assert all(0.0 < factor <= 1.0 for factor in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling:
        assert falling[0] == 1.0
    if name != "constant" and len(falling) > 1:
        half = factor_at(name, warmup, num_steps, warmup + len(falling) // 2)
        share = (len(falling) // 2) / len(falling)
        assert half == pytest.approx(1 - share if name == "linear" else (1 + math.cos(math.pi * share)) / 2)
        assert factor_at(name, warmup, num_steps, num_steps) == pytest.approx(0.0)


def test_a_schedule_that_ends_is_not_extended(tmp_path: Path) -> None:
    options = {"lr_schedule": "cosine", "batch_size": 8, "run_dir": str(tmp_path / "run"), "quiet": True}
    instep.train(Plain(), epochs=2, **options)
    with pytest.raises(CheckpointError, match="scheduler depends on it"):
        prepare_directory(Plain(), TrainSpec(epochs=3, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 2}, "patience=2 is for --stop-when"),
        ({"warmup": 5}, "warmup=5 belongs to a schedule by name"),
        ({"stop_when": "noisy/eval_loss"}, "Write noisy/eval_loss:min"),
        ({"stop_when": "eval_loss:less"}, "stop_when='eval_loss:less' is not a metric"),
    ],
)
def test_options_that_belong_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        TrainSpec(**options)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (Overfits(), {"lr_schedule": "cosine"}, "the Task has a scheduler, and lr_schedule=cosine"),
        (Overfits(schedule="most"), {}, r"needs a metric of which more is better\. Name it: --keep-best"),
        (Overfits(schedule="hours"), {}, '"interval": "epoch"'),
        (Overfits(schedule="plateau"), {"eval_every": "never"}, "there is none in the course of this run"),
        (Overfits(), {"stop_when": "accuracy"}, "stop_when=accuracy: there is no such metric. This Task has eval_loss"),
    ],
)
def test_what_cannot_be(task: instep.Task, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    spec = TrainSpec(batch_size=8, epochs=1, **options)
    with pytest.raises(TaskError, match=words):
        worker_main(World.join(Place()), task, spec, RunDirectory(tmp_path))


class TwoSets(Overfits):
    def eval_data(self) -> Any:
        x, y = super().eval_data()
        return {"first": (x[:5], y[:5]), "rest": (x[5:], y[5:])}


def evaluated_on_two(world: World, run_dir: str) -> list[dict[str, float]]:
    options = {"stop_when": "rest/closeness", "patience": 1, "keep_best": "first/eval_loss:min"}
    spec = TrainSpec(batch_size=8, epochs=12, seed=5, exact=True, shards=4, save_every="never", **options)
    worker_main(world, TwoSets(schedule="plateau"), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    return [event["metrics"] for event in read_events(Path(run_dir)) if event["event"] == "eval"]


def test_several_evaluation_sets(tmp_path: Path) -> None:
    alone = run_ranks(evaluated_on_two, 1, str(tmp_path / "1"))[0]
    assert list(alone[0]) == [f"{name}/{metric}" for name in ("first", "rest") for metric in ("eval_loss", "closeness")]
    assert 1 < len(alone) < 12
    for world_size in (2, 3):
        assert run_ranks(evaluated_on_two, world_size, str(tmp_path / str(world_size)))[0] == alone


def test_names_of_evaluation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overfits, "eval_data", lambda self: {"a/b": self.train_data()})
    with pytest.raises(TaskError, match="Give several sets names without a slash"):
        worker_main(World.join(Place()), Overfits(), TrainSpec(batch_size=8, epochs=1), RunDirectory(tmp_path))
