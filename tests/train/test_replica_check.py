"""Ranks that drift apart are found, and the run goes on from where they agreed; slow ones are named."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import DivergenceError
from instep.events.read import read_events
from instep.train import replica_check
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

FLIPPED_AT, FOUND_AT, AGREED_AT = 6, 8, 4
OPTIONS = {
    "steps": 12,
    "batch_size": 12,
    "threads": 1,
    "check_every": 4,
    "save_every": "1",
    "keep": 2,
    "drop_last": True,
}
NAMES = {
    "parameter": "0.weight",
    "optimizer": "optimizer momentum_buffer of 0.weight",
    "statistics": "1.running_var",
}


@dataclass(kw_only=True)
class Flipping(Small):
    """Flips one bit on one rank, once."""

    what: str = ""
    rank: int = 1
    marker: str = ""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        self.made = super().optimizer(params)
        return self.made

    def loss(self, model: Any, batch: Any) -> Any:
        if self.what and model_is_trained(model) and self.run_step() == FLIPPED_AT and dist.get_rank() == self.rank:
            self.flip(model)
        return super().loss(model, batch)

    def flip(self, model: Any) -> None:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            state = self.made.state[model[0].weight]["momentum_buffer"]
            tensor = {"parameter": model[0].weight, "optimizer": state, "statistics": model[1].running_var}[self.what]
            tensor.detach().view(-1).view(torch.uint8)[9] ^= 4

    def run_step(self) -> int:
        """The step under way, by what the schedule has counted."""
        return self.counter.last_epoch + 1

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        self.counter = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
        return self.counter


def model_is_trained(model: Any) -> bool:
    """Distinguish a step from an evaluation."""
    return isinstance(model, nn.Module) and model.training


def train_cases(world: World, folder: str, options: dict[str, Any], slow_disk: bool) -> list[Any]:
    """Train undisturbed, then with a bit flipped in each place: the error, what it left, and the weights after it."""
    spec = instep.TrainSpec(**OPTIONS | options)
    if slow_disk:
        fsync = os.fsync

        def slow(fd: int) -> None:
            if threading.current_thread().name == "instep-save":
                time.sleep(0.01)
            fsync(fd)

        os.fsync = slow  # a process of its own, which ends with this test
    results: list[Any] = [worker_main(world, Flipping(), spec, RunDirectory(Path(folder) / "whole")).weights_sha256]
    for what in NAMES:
        task = Flipping(what=what, rank=world.world_size - 1, marker=f"{folder}/{what}-flipped")
        directory = RunDirectory(Path(folder) / what)
        with pytest.raises(DivergenceError) as caught:
            worker_main(world, task, spec, directory)
        world.barrier()
        left = sorted(entry.name for entry in directory.checkpoints.iterdir())
        world.barrier()
        results.append((str(caught.value), left, worker_main(world, task, spec, directory).weights_sha256))
    return results


EXACT = {"exact": True, "shards": 4}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(2, {}, id="ddp-2"),
        pytest.param(3, EXACT, id="exact-3"),
        pytest.param(3, {}, id="ddp-3", marks=pytest.mark.slow),
        pytest.param(2, EXACT, id="exact-2", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_found_and_undone(world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    slow_disk = world_size == 3 and bool(options)
    answers = run_ranks(train_cases, world_size, str(tmp_path), options, slow_disk)
    assert all(each == answers[0] for each in answers)  # every rank says the same
    whole, *cases = answers[0]
    for (text, left, after), name in zip(cases, NAMES.values(), strict=True):
        assert f"between step {AGREED_AT} and step {FOUND_AT} " in text
        if world_size == 2:
            assert f"ranks 0, 1 differ in {name}" in text
            assert "either may be wrong" in text
        else:
            assert f"rank 2 differs from the other 2 in {name}" in text
        assert left == ["doubtful-step-00000006", "doubtful-step-00000007", "step-00000004"]
        assert after == whole


def test_the_launcher_goes_on_from_what_agreed(tmp_path: Path) -> None:
    options = OPTIONS | {"processes": 2, "quiet": True, "exact": True, "shards": 4}
    whole = instep.train(Flipping(), run_dir=str(tmp_path / "whole"), **options)
    task = Flipping(what="parameter", marker=str(tmp_path / "flipped"))
    result = instep.train(task, run_dir=str(tmp_path / "flipped-run"), **options)
    assert (result.restarts, result.weights_sha256) == (1, whole.weights_sha256)
    plans = [event["first_step"] for event in read_events(tmp_path / "flipped-run") if event["event"] == "plan"]
    assert plans == [0, AGREED_AT]
    Path(task.marker).unlink()
    with pytest.raises(instep.InstepError, match="no longer hold the same") as caught:
        instep.train(task, run_dir=str(tmp_path / "stopped"), **options | {"max_restarts": 0, "check_every": 100})
    assert "between step 0 and step 12" in str(caught.value)  # the end is always looked at
    assert caught.value.first.exit_code == 3
    assert not (tmp_path / "stopped" / "result.json").exists()


class Writing(nn.Module):
    """Leaves something of its rows in a buffer, not yet in the first two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self._passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._passes += self.training
        if self._passes > 2:
            self.seen.copy_(x.detach().mean(0))
        return x


class Written(Small):
    """A model that writes to a buffer in its forward pass."""

    def model(self) -> nn.Module:
        model = super().model()
        model[2] = nn.Sequential(model[2], Writing())
        return model


@dataclass(kw_only=True)
class Lagging(Small):
    """One rank takes longer, with its data or with the model."""

    phase: str = "data"

    def train_data(self) -> Any:
        return _Slow(self.phase == "data")

    def loss(self, model: Any, batch: Any) -> Any:
        if self.phase != "data" and dist.get_rank() == 1:
            time.sleep(0.03)
        return super().loss(model, batch)


class _Slow:
    def __init__(self, is_slow: bool) -> None:
        self._columns, self._is_slow = made_up(48), is_slow

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if self._is_slow and dist.get_rank() == 1:
            time.sleep(0.005)
        return tuple(column[index] for column in self._columns)


def notices_of(world: World, folder: str, tasks: dict[str, Any], options: dict[str, Any]) -> None:
    for name, task in tasks.items():
        directory = RunDirectory(Path(folder) / name)
        spec = instep.TrainSpec(**OPTIONS | {"save_every": "never", "eval_every": "never", "data_workers": 0} | options)
        worker_main(world, task, spec, directory)


def said_in(run_dir: Path) -> list[str]:
    return [event["text"] for event in read_events(run_dir) if event["event"] == "notice"]


def test_buffers_that_a_model_writes_are_told_once(tmp_path: Path) -> None:
    run_ranks(notices_of, 2, str(tmp_path), {"plain": Written()}, {})
    answers = [text for text in said_in(tmp_path / "plain") if "hold different values" in text]
    assert len(answers) == 1
    assert "the buffer 2.1.seen, which" in answers[0]
    run_ranks(notices_of, 2, str(tmp_path), {"exact": Written()}, {"exact": True, "shards": 4})
    assert not said_in(tmp_path / "exact")


def test_a_rank_that_holds_the_others_up_is_named_once(tmp_path: Path) -> None:
    tasks = {phase: Lagging(phase=phase) for phase in ("data", "forward and backward")}
    run_ranks(notices_of, 2, str(tmp_path), tasks, {"check_every": 2, "steps": 10})
    for phase in tasks:
        answers = [text for text in said_in(tmp_path / phase) if "wait" in text]
        assert len(answers) == 1, said_in(tmp_path / phase)
        assert answers[0].startswith("rank 1 takes ")
        assert f"ms a step for {phase} where the other takes" in answers[0]


def test_a_world_of_one_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_check, "fingerprints", None)
    instep.train(Small(), steps=4, check_every=1, quiet=True, run_dir=str(tmp_path))
