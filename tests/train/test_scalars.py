"""Numbers of one's own beside the loss: the same at any world size, in every mode, and after a kill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.scalars import loss_parts
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks

NUM_SAMPLES, BATCH, STEPS = 22, 8, 9
PER_EPOCH = 3


@dataclass(kw_only=True)
class Own(instep.Task):
    num_more: int = 0
    by_tokens: bool = False
    dies_at: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05)

    def train_data(self) -> Any:
        x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return x, torch.arange(NUM_SAMPLES, dtype=torch.float64)

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: Any, batch: Any) -> Any:
        x, number = batch
        output = model(x)
        parts = {"loss": (output.square().sum(1) + 1).mean(), "mean_number": number.mean(), "output": output.mean()}
        parts |= {f"more_{i}": number.mean() * i for i in range(self.num_more)}
        if self.by_tokens:
            tokens = 1 + number % 5
            parts |= {"mean_number": (number * tokens).sum() / tokens.sum(), "weight": tokens.sum()}
            parts["output"] = (output[:, 0] * tokens).sum() / tokens.sum()
            parts["loss"] = ((output.square().sum(1) + 1) * tokens).sum() / tokens.sum()
        return parts

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Train, and return the events of steps, epochs and evaluations."""
    spec = TrainSpec(batch_size=BATCH, steps=STEPS, seed=5, **{"save_every": "never", **options})
    worker_main(world, Own(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    return told(run_dir)


def told(run_dir: str) -> list[dict[str, Any]]:
    kinds = ("step", "epoch", "eval")
    events = [event for event in read_events(Path(run_dir)) if event["event"] in kinds]
    return [{key: value for key, value in event.items() if key not in ("time", "seconds")} for event in events]


def trained(world_size: int, run_dir: Path, options: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return run_ranks(_train, world_size, str(run_dir), options, fields)[0]


def _train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> list[dict[str, Any]]:
    return train(world, run_dir, options, **fields)


def numbers(events: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Return all numbers, with where they come from."""
    rows = []
    for event in events:
        values = {"loss": event.get("loss", 0.0), **event.get("scalars", {}), **event.get("metrics", {})}
        rows += [(event["event"], name, value) for name, value in values.items()]
    return rows


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"accumulate": 2}, {"by_tokens": True}),
        ({"strategy": "fsdp"}, {"num_more": 9}),
        ({"strategy": "pipeline", "eval_every": "never"}, {}),
    ],
    ids=["ddp", "by tokens", "fsdp, more than there are slots", "pipeline"],
)
def test_the_same_on_any_number_of_ranks(options: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    alone = {key: value for key, value in options.items() if key != "strategy"}
    expected = numbers(trained(1, tmp_path / "1", alone, **fields))
    for world_size in (2, 3) if "strategy" not in options else (2,):
        actual = numbers(trained(world_size, tmp_path / str(world_size), options, **fields))
        assert [row[:2] for row in actual] == [row[:2] for row in expected]
        assert [row[2] for row in actual] == pytest.approx([row[2] for row in expected], rel=1e-9)


def test_the_same_bits_in_exact_mode(tmp_path: Path) -> None:
    options = {"exact": True, "shards": 4}
    expected = trained(1, tmp_path / "1", options, num_more=9)
    assert len(expected[0]["scalars"]) == 11
    for world_size in (2, 3, 4):  # the last batch of an epoch has three shards
        assert trained(world_size, tmp_path / str(world_size), options, num_more=9) == expected


def test_means_over_the_batch_and_over_the_epoch(tmp_path: Path) -> None:
    events = train(World.join(Place()), str(tmp_path), {})
    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [(epoch["epoch"], epoch["step"], epoch["num_samples"]) for epoch in epochs] == [
        (number, PER_EPOCH * (number + 1), NUM_SAMPLES) for number in range(3)
    ]
    for number, epoch in enumerate(epochs):
        assert epoch["scalars"]["mean_number"] == pytest.approx((NUM_SAMPLES - 1) / 2)  # each sample counts once
        own = steps[PER_EPOCH * number : PER_EPOCH * (number + 1)]
        assert epoch["loss"] == pytest.approx(sum(s["loss"] * s["num_samples"] for s in own) / NUM_SAMPLES)
    evaluated = next(event for event in events if event["event"] == "eval")["metrics"]
    assert evaluated["eval_mean_number"] == pytest.approx((NUM_SAMPLES - 1) / 2)


@pytest.mark.parametrize("dies_at", [4, 5])
def test_killed_in_the_middle_of_an_epoch(dies_at: int, tmp_path: Path) -> None:
    world = World.join(Place())
    whole = train(world, str(tmp_path / "whole"), {"save_every": "1"})
    with pytest.raises(KeyboardInterrupt):
        train(world, str(tmp_path / "killed"), {"save_every": "1"}, dies_at=dies_at)
    again = train(world, str(tmp_path / "killed"), {"save_every": "1"})
    assert len(again) == len(whole) + 1
    assert [*{(event["event"], event["step"]): event for event in again}.values()] == whole  # one step was made twice


def own_loop(world: World, run_dir: str) -> list[dict[str, Any]]:
    task = Own()
    with instep.start(seed=5, run_dir=run_dir, save_every="never", quiet=True) as run:
        model, _ = run.prepare(task.model(), task.optimizer)
        for step in run.steps(task.train_data(), batch_size=BATCH, steps=STEPS):
            for x, number in step.shards():
                loss = model(x).square().mean()
                step.log(mean_number=number.mean())
                if step.number % 3 == 2:  # a name that comes later, and not always
                    step.log(sometimes=7.0, weight=2.0)
                step.backward(loss)
            step.finish()
    return told(run_dir)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    events = [event for event in own_loop(World.join(Place()), str(tmp_path)) if event["event"] == "step"]
    assert [list(event["scalars"]) for event in events[:3]] == [
        ["mean_number"],
        ["mean_number", "sometimes"],
        ["mean_number"],
    ]
    assert {event["scalars"]["sometimes"] for event in events if "sometimes" in event["scalars"]} == {7.0}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"kl": 1.0}, 'a dict with kl, and without "loss"'),
        ({"loss": torch.ones(()), "logits": torch.ones(4, 2)}, "the scalar 'logits' is a tensor of shape (4, 2)"),
        ({"loss": torch.ones(()), "name": "kl"}, "the scalar 'name' is a str"),
    ],
)
def test_what_is_no_number(value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(_task: Own, model: Any, batch: Any) -> Any:
        mean = model(batch[0]).mean()
        return {**value, "loss": mean} if "loss" in value else value

    monkeypatch.setattr(Own, "loss", loss)
    with pytest.raises(TaskError, match=words.replace("(", r"\(").replace(")", r"\)")):
        train(World.join(Place()), str(tmp_path), {})


def test_a_loss_alone_or_with_a_weight() -> None:
    mean = torch.ones(())
    assert loss_parts(mean) == (mean, None, None)
    assert loss_parts((mean, 3.0)) == (mean, 3.0, None)
    assert loss_parts({"loss": mean, "weight": 2, "kl": 1}) == (mean, 2, {"kl": 1})
    assert math.isnan(loss_parts({"loss": mean, "kl": math.nan}).scalars["kl"])
