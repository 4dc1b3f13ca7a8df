"""Tokens of a step: counted by the loss's weights or by the data, and shown as a speed beside samples per second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import path_of, read_events
from instep.events.schema import StepRecord, to_line
from instep.events.write import EventLog
from instep.monitor.page.view import RunView
from instep.monitor.progress import ProgressState
from instep.monitor.report.collect import collect
from instep.monitor.report.tables import key_numbers
from instep.train.tokens import count_tokens
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks

LENGTHS = np.random.default_rng(1).integers(2, 30, 60)
LENGTH = 7


@dataclass(kw_only=True)
class Texts(instep.Task):
    """Texts of several lengths, or windows of one; `weighted`: the loss gives their tokens as its weight."""

    by: str = "lengths"
    weighted: bool = False
    file: str = ""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    def train_data(self) -> Any:
        if self.by == "windows":
            return instep.data.tokens(self.file, LENGTH)
        samples = torch.from_numpy(LENGTHS)[:, None].float(), torch.from_numpy(LENGTHS)
        return instep.data.bucketed(samples, LENGTHS) if self.by == "lengths" else samples

    def loss(self, model: Any, batch: Any) -> Any:
        x, lengths = batch
        loss = model(x.float()[:, :1]).square().mean()
        return (loss, lengths.sum()) if self.weighted else loss


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> None:
    worker_main(world, Texts(**fields), TrainSpec(epochs=2, save_every="never", **options), RunDirectory(Path(run_dir)))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == "step"]


@pytest.mark.parametrize(("world_size", "exact"), [(1, False), (2, False), (2, True)])
def test_weights_of_tokens_are_counted(tmp_path: Path, world_size: int, exact: bool) -> None:
    options = {"batch_size": 8, "accumulate": 2, "exact": exact}
    run_ranks(train, world_size, str(tmp_path), options, {"by": "plain", "weighted": True})
    steps = steps_of(tmp_path)
    assert sum(step["num_tokens"] for step in steps) == 2 * LENGTHS.sum()
    assert all(step["num_tokens"] > step["num_samples"] for step in steps)


def test_batches_by_tokens_know_theirs(tmp_path: Path) -> None:
    run_ranks(train, 1, str(tmp_path), {"batch_tokens": 90}, {})
    steps = steps_of(tmp_path)
    assert sum(step["num_tokens"] for step in steps) == pytest.approx(2 * LENGTHS.sum(), abs=len(steps))
    assert all(45 <= step["num_tokens"] <= 90 for step in steps[:3])


def test_windows_have_as_many_each(tmp_path: Path) -> None:
    np.arange(1 + 20 * LENGTH, dtype="<u2").tofile(tmp_path / "a.bin")
    fields = {"by": "windows", "file": str(tmp_path / "a.bin")}
    run_ranks(train, 1, str(tmp_path / "run"), {"batch_size": 8}, fields)
    assert [step["num_tokens"] for step in steps_of(tmp_path / "run")] == [8 * LENGTH, 8 * LENGTH, 4 * LENGTH] * 2


def test_other_data_has_none(tmp_path: Path) -> None:
    run_ranks(train, 1, str(tmp_path), {"batch_size": 8}, {"by": "plain"})
    assert all("num_tokens" not in step for step in steps_of(tmp_path))


@pytest.mark.parametrize(
    ("weight", "of_data", "expected"),
    [
        (120.0, None, 120),
        (120.0, 128, 120),  # with padding or without: the loss knows better
        (None, 128, 128),
        (8.0, None, None),  # the rows
        (7.5, None, None),  # weights of classes
        (float("nan"), None, None),
        (float("inf"), 128, 128),
    ],
)
def test_what_counts_as_tokens(weight: float | None, of_data: int | None, expected: int | None) -> None:
    assert count_tokens(weight, 8, of_data) == expected


def log_of(run_dir: Path, num_tokens: int | None) -> None:
    """Write a log of 40 steps of 8 samples, a quarter of a second each."""
    log = EventLog(run_dir, 0)
    for number in range(1, 41):
        record = StepRecord(step=number, epoch=0, loss=1.0, lr=0.1, num_samples=8, num_tokens=num_tokens)
        log._pending.append((record, 1e9 + number / 4))
    log.close()


@pytest.mark.parametrize("num_tokens", [None, 1000])
def test_every_display_has_the_speed(tmp_path: Path, num_tokens: int | None) -> None:
    log_of(tmp_path, num_tokens)
    state = ProgressState()
    for event in read_events(tmp_path):
        state.take(event)
    assert ("4,000 tokens/s" in state.line()) == (num_tokens is not None)
    assert "32 samples/s" in state.line()
    view = RunView(tmp_path)
    view.advance(10.0)
    expected = None if num_tokens is None else pytest.approx(4000.0)
    assert view.facts()["tokens_per_s"] == expected
    assert view.facts()["samples_per_s"] == pytest.approx(32.0)
    facts = collect(tmp_path)
    assert facts.tokens_per_s == expected
    assert facts.samples_per_s == pytest.approx(32.0)
    assert ("tokens/s" in dict(key_numbers(facts))) == ("tokens/s" in facts.curves) == (num_tokens is not None)


def test_a_line_in_another_form_has_its_tokens_too(tmp_path: Path) -> None:
    log_of(tmp_path, 1000)
    path = path_of(tmp_path)
    record = StepRecord(step=41, epoch=0, loss=1.0, lr=0.1, num_samples=8, num_tokens=1000, skipped=True)
    with path.open("a") as file:
        file.write(json.dumps(to_line(record, 1e9 + 41 / 4)) + "\n")
    assert collect(tmp_path).tokens_per_s == pytest.approx(4000.0)
