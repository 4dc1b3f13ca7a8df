"""Trainings on batches by tokens and on mixtures: the same answer at any world size, after stops and resizes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import instep
from instep import data
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.events.schema import StepRecord
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks

N, WORDS, STEPS = 53, 11, 26
LENGTHS = [2 + i * 37 % 19 for i in range(N)]


class Texts(Dataset[Any]):
    """Sequences of tokens, some of which are masked at random."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        tokens = torch.arange(LENGTHS[number]) * (number + 1) % (WORDS - 1) + 1
        return torch.where(torch.rand(len(tokens)) < 0.1, WORDS - 1, tokens)


def weights_at(step: int) -> dict[str, float]:
    return {"many": 1.0, "few": step / 10}


@dataclass(kw_only=True)
class Reads(instep.Task):
    """Guesses the next token; the loss counts by tokens."""

    kind: str
    stop_at: int = 0
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.1), nn.Linear(8, WORDS)).to(self.dtype)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    def train_data(self) -> Any:
        if self.kind == "tokens":
            return data.bucketed(Texts(0, N), LENGTHS)
        return data.mix({"many": Texts(0, 40), "few": data.weighted(Texts(40, N), LENGTHS[40:])}, weights_at)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(samples, batch_first=True)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        known = batch[:, 1:] != 0
        losses = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")
        return (losses * known).sum() / known.sum().clamp(min=1), float(known.sum())

    def on_step(self, record: StepRecord) -> None:
        if record.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)


SIZES: dict[str, dict[str, Any]] = {"tokens": {"batch_tokens": 90}, "mix": {"batch_size": 9}}


def train(world: World, folder: str, kind: str, stop_at: int, options: dict[str, Any]) -> dict[str, Any]:
    spec = TrainSpec(**{"steps": STEPS, "seed": 5, "threads": 1, "save_every": "never", **SIZES[kind], **options})
    task = Reads(kind=kind, stop_at=stop_at, dtype=torch.float32 if spec.exact else torch.float64)
    with process_settings(spec, world.world_size):
        result = worker_main(world, task, spec, RunDirectory(Path(folder)))
    world.barrier()
    steps = {event["step"]: event for event in read_events(Path(folder)) if event["event"] == "step"}
    return {
        "status": result.status,
        "sha256": result.weights_sha256,
        "sizes": [step["num_samples"] for step in steps.values()],
        "losses": [step["loss"] for step in steps.values()],
    }


def alone(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    return train(World.join(Place()), str(folder / "alone"), kind, 0, options)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", SIZES)
def test_the_same_bits_at_any_world_size_and_after_stops(kind: str, tmp_path: Path) -> None:
    exact = {"exact": True, "shards": 3}
    expected = alone(tmp_path, kind, **exact)
    assert len(set(expected["losses"])) == STEPS
    for world_size in (2, 3):
        folder = str(tmp_path / str(world_size))
        assert run_ranks(train, world_size, folder, kind, 0, exact) == [expected] * world_size
    for world_size, stop_at in ((3, 5), (1, 13), (2, 0)):
        results = run_ranks(train, world_size, str(tmp_path / "changing"), kind, stop_at, exact)
        assert results[0]["status"] == ("preempted" if stop_at else "complete")
    assert results == [expected] * 2


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_losses_at_any_world_size(kind: str, accumulate: int, tmp_path: Path) -> None:
    expected = alone(tmp_path, kind, accumulate=accumulate)
    for world_size in (2, 3):
        folder = str(tmp_path / str(world_size))
        actual = run_ranks(train, world_size, folder, kind, 0, {"accumulate": accumulate})[0]
        assert actual["sizes"] == expected["sizes"]
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-11)


def test_what_the_log_says(tmp_path: Path) -> None:
    alone(tmp_path / "tokens", "tokens")
    events = list(read_events(tmp_path / "tokens" / "alone"))
    plan = next(event for event in events if event["event"] == "plan")
    sizes = [event["num_samples"] for event in events if event["event"] == "step"]
    assert plan["batch_tokens"] == 90
    assert plan["batch_size"] == max(sizes) > min(sizes)
    assert sum(sizes[: plan["steps_per_epoch"]]) == N
    assert any("tokens are padding" in event.get("text", "") for event in events)
    alone(tmp_path / "mix", "mix")
    events = list(read_events(tmp_path / "mix" / "alone"))
    taken = [event for event in events if event["event"] == "sources"]
    assert [event["step"] for event in taken] == [6, 12, 18, 24, 26]
    for event in taken:
        seen = [step["num_samples"] for step in events if step["event"] == "step" and step["step"] <= event["step"]]
        assert sum(event["num_samples"].values()) == sum(seen)
    assert taken[-1]["num_samples"]["few"] > taken[-1]["num_samples"]["many"] * 0.4


def test_batches_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="batch_tokens=90 and batch_size=9 both"):
        TrainSpec(batch_tokens=90, batch_size=9)
    options = {"steps": 2, "quiet": True}
    with pytest.raises(SpecError, match=r"batch_tokens=18 is less than the 20 tokens of sample 1,"):
        instep.train(Reads(kind="tokens"), batch_tokens=18, **options)
    with pytest.raises(SpecError, match="batch_tokens=90 needs the length of each sample"):
        instep.train(Reads(kind="mix"), batch_tokens=90, **options)
