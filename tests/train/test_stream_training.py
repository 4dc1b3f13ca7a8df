"""Training on streams, torch's and those of `datasets`: the same bits at any world size, and after a kill."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import DataError, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.worker import make_result, open_run, worker_main
from instep.world.world import World
from ranks import run_ranks

COUNT, STEPS, BATCH = 50, 14, 8  # two epochs of seven steps, the last of two elements
EXACT: dict[str, Any] = {"exact": True, "shards": 4}


def element(i: int) -> dict[str, Any]:
    return {"x": [float(i % 7), float(i % 5), i / COUNT], "y": float(i % 3)}


class Torchs(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for i in range(COUNT):
            values = element(i)
            yield {"x": torch.tensor(values["x"]) + 0.1 * torch.randn(3), "y": values["y"] + random.random()}


class SplitByRank(Torchs):
    def __iter__(self) -> Iterator[Any]:
        elements = list(super().__iter__())
        return iter(elements[int(os.environ["RANK"]) :: 2])


def generated() -> Iterator[Any]:
    yield from map(element, range(COUNT))


def augmented(example: dict[str, Any]) -> dict[str, Any]:
    x = torch.as_tensor(example["x"]) + 0.1 * torch.randn(3)
    return {"x": x if isinstance(example["x"], list) else x.numpy(), "y": float(example["y"]) + random.random()}


def stream_of(kind: str) -> Any:
    """Return a stream; of `datasets` all but the first two."""
    if kind in ("torch", "split"):
        return Torchs() if kind == "torch" else SplitByRank()
    import datasets

    if kind == "generator":
        return datasets.IterableDataset.from_generator(generated).map(augmented)
    table = datasets.Dataset.from_list(list(generated()))
    stream = table.to_iterable_dataset(num_shards=3).with_format("torch")
    # Shuffled first: it interleaves shards in threads of its own, in which nothing may draw.
    return (stream.shuffle(seed=3, buffer_size=10) if kind == "shuffled" else stream).map(augmented)


@dataclass(kw_only=True)
class Fit(instep.Task):
    kind: str = "torch"
    eval_kind: str = ""
    dies_at: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_steps)

    def train_data(self) -> Any:
        return stream_of(self.kind)

    def eval_data(self) -> Any:
        return stream_of(self.eval_kind or self.kind)

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["x"])[:, 0] - batch["y"].float()).square().mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"error": (model(batch["x"])[:, 0] - batch["y"].float()).abs()}

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Train; return the weights, the metrics, and the losses and epochs of the steps."""
    spec = TrainSpec(**{"batch_size": BATCH, "steps": STEPS, "seed": 5, "save_every": "never", **options})
    result = worker_main(world, Fit(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    steps = {event["step"]: event for event in read_events(Path(run_dir)) if event["event"] == "step"}
    losses = [(event["epoch"], event["num_samples"], event["loss"]) for event in steps.values()]
    return result.weights_sha256, result.metrics, result.epochs, losses


@pytest.mark.parametrize("kind", ["torch", "generator", "table", "shuffled"])
def test_the_same_bits_at_any_world_size_and_after_a_kill(kind: str, tmp_path: Path) -> None:
    expected = train(World.join(Place()), str(tmp_path / "1"), EXACT, {"kind": kind})
    _, metrics, epochs, losses = expected
    assert epochs == 2
    assert [size for _, size, _ in losses] == [8, 8, 8, 8, 8, 8, 2] * 2
    assert [epoch for epoch, _, _ in losses] == [0] * 7 + [1] * 7
    assert {"error", "eval_loss"} <= metrics.keys()
    for world_size in (2, 3) if kind == "torch" else ():
        assert run_ranks(train, world_size, str(tmp_path / str(world_size)), EXACT, {"kind": kind})[0] == expected
    options, killed = {**EXACT, "save_every": "1"}, str(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        train(World.join(Place()), killed, options, {"kind": kind, "dies_at": 11})
    if kind in ("torch", "shuffled"):
        continued = run_ranks(train, 2, killed, options, {"kind": kind})[0]
    else:
        continued = train(World.join(Place()), killed, options, {"kind": kind})
    assert continued == expected
    texts = [event["text"] for event in read_events(Path(killed)) if event["event"] == "notice"]
    assert any("The training data is a stream" in text for text in texts)
    # What a shuffle buffer held is not in the state of `datasets`; that is noticed, and the stream read again.
    assert any("does not lead back" in text for text in texts) == (kind == "shuffled"), texts


def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    world = World.join(Place())
    expected = train(world, str(tmp_path / "0"), {**EXACT, "data_workers": 0}, {})
    assert train(world, str(tmp_path / "2"), {**EXACT, "data_workers": 2}, {}) == expected


def test_normal_mode_without_the_last_batch(tmp_path: Path) -> None:
    options = {"drop_last": True, "steps": 12, "accumulate": 2}
    expected = train(World.join(Place()), str(tmp_path / "1"), options, {})
    two = run_ranks(train, 2, str(tmp_path / "2"), options, {})[0]
    assert two[2] == expected[2] == 2
    for ours, theirs in zip(two[3], expected[3], strict=True):
        assert ours[:2] == theirs[:2] == (theirs[0], BATCH)
        assert ours[2] == pytest.approx(theirs[2], rel=1e-4)


def own_loop(world: World, run_dir: str, stops: tuple[int, ...]) -> str:
    """Train in several calls of steps(), in one process or in several after each other."""
    with open_run(world, TrainSpec(batch_size=BATCH, seed=5, **EXACT), RunDirectory(Path(run_dir)), "loop") as run:
        model, _ = run.prepare(nn.Linear(3, 1), lambda params: torch.optim.SGD(params, lr=0.05))
        data = Torchs()
        for stop in stops:
            for step in run.steps(data, steps=stop):
                for batch in step.shards():
                    step.backward((model(batch["x"])[:, 0] - batch["y"].float()).square().mean())
                step.finish()
        scores = run.evaluate(lambda m, batch: {"error": m(batch["x"])[:, 0].abs()}, data)
        run.save_last()
        return f"{make_result(run, 0.0, 0).weights_sha256} {scores} {run.epochs}"


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    world = World.join(Place())
    expected = own_loop(world, str(tmp_path / "a"), (STEPS,))
    assert own_loop(world, str(tmp_path / "b"), (5, STEPS)) == expected
    assert run_ranks(own_loop, 2, str(tmp_path / "c"), (STEPS,)) == [expected] * 2
    own_loop(world, str(tmp_path / "d"), (9,))
    assert own_loop(world, str(tmp_path / "d"), (STEPS,)) == expected


def test_without_a_length_epochs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"Torchs.*does not say how many elements"):
        train(World.join(Place()), str(tmp_path), {"steps": None, "epochs": 2}, {})


def refusal(world: World, run_dir: str, fields: dict[str, Any]) -> tuple[str, int]:
    """Return what a training is refused with, and after how many steps."""
    os.environ["RANK"] = str(world.rank)
    with pytest.raises(DataError) as caught:
        train(world, run_dir, {"eval_every": "never"}, fields)
    world.barrier()
    return str(caught.value), sum(event["event"] == "step" for event in read_events(Path(run_dir)))


@pytest.mark.parametrize(("fields", "num_steps"), [({"kind": "split"}, 0), ({"eval_kind": "split"}, STEPS)])
def test_ranks_that_read_different_elements_are_refused(fields: Any, num_steps: int, tmp_path: Path) -> None:
    for text, made in run_ranks(refusal, 2, str(tmp_path), fields):
        assert "Ranks 0 and 1 read different elements" in text
        assert "split_dataset_by_node" in text
        assert made == num_steps
