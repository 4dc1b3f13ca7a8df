"""Every rank and every attempt has the same training data, or it is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.data_check import digest_of
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

SPEC: dict[str, Any] = {"steps": 2, "batch_size": 8, "threads": 1, "eval_every": "never"}


@dataclass(kw_only=True)
class Shifted(Small):
    """Other samples by `shift`, or in each reading."""

    shift: float = 0.0
    noisy: bool = False

    def train_data(self) -> Any:
        if not self.noisy:
            x, y = made_up(self.num_samples)
            return x + self.shift, y
        return _Noisy()


class _Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.seed()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6, generator=self.generator).double(), index % 3


def train(world: World, folder: str, noisy: bool) -> list[str]:
    task = Shifted(shift=float(world.rank), noisy=noisy)
    worker_main(world, task, TrainSpec(**SPEC), RunDirectory(Path(folder)))
    return [event["event"] for event in read_events(Path(folder))]


def test_ranks_with_other_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"TaskError: train_data\(\) gives rank 1 other samples than rank 0"):
        run_ranks(train, 2, str(tmp_path), False)


def test_noise_of_each_reading_is_no_difference(tmp_path: Path) -> None:
    assert run_ranks(train, 2, str(tmp_path), True)[0].count("step") == 2


def test_a_run_that_continues_with_other_samples_says_so(tmp_path: Path) -> None:
    def notices() -> list[str]:
        events = [e for e in read_events(tmp_path / "run") if e["event"] == "notice"]
        return [e["text"] for e in events if "began with" in e["text"]]

    task = _task_by_file(tmp_path)
    for steps, shift, expected in ((2, 0.0, 0), (3, 0.0, 0), (4, 1.0, 1)):
        (tmp_path / "shift").write_text(str(shift))
        instep.train(task, **{**SPEC, "steps": steps}, run_dir=str(tmp_path / "run"), quiet=True)
        assert len(notices()) == expected


def _task_by_file(folder: Path) -> instep.Task:
    class FromFile(Small):
        def train_data(self) -> Any:
            x, y = made_up(self.num_samples)
            return x + float((folder / "shift").read_text()), y

    return FromFile()


def test_a_collate_that_draws_is_named(tmp_path: Path) -> None:
    class Masking(Small):
        def train_data(self) -> Any:
            return list(zip(*made_up(20), strict=True))

        def collate(self, samples: list[Any]) -> Any:
            x, y = torch.utils.data.default_collate(samples)
            return x * torch.bernoulli(torch.full_like(x, 0.9)) if self.lr < 1 else x, y

    for lr, expected in ((0.05, 1), (1.0, 0)):
        instep.train(Masking(lr=lr), **SPEC, run_dir=str(tmp_path / str(lr)), quiet=True)
        texts = [e["text"] for e in read_events(tmp_path / str(lr)) if e["event"] == "notice"]
        assert sum("collate draws random numbers" in text for text in texts) == expected


def test_a_digest_is_of_values_names_and_shapes() -> None:
    batch = {"x": torch.arange(4), "text": ["a", "b"], "more": (1.0, None)}
    assert digest_of(batch) == digest_of({"x": torch.arange(4), "text": ["a", "b"], "more": (1.0, None)})
    for other in ({**batch, "x": torch.arange(4).view(2, 2)}, {**batch, "text": ["a", "c"]}, {**batch, "more": (2.0,)}):
        assert digest_of(other) != digest_of(batch)
