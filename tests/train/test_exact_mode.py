"""Exact mode beyond plain trainings: loops of one's own, refusals, messages."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, SpecError, TaskError
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.worker import make_result, open_run, worker_main
from instep.world.determinism import deterministic
from instep.world.world import World
from ranks import run_ranks
from tasks import Small


def train(task: Any, run_dir: Path, **options: Any) -> instep.Result:
    given = {"epochs": 2, "batch_size": 10, "exact": True, "quiet": True, "run_dir": str(run_dir)}
    return instep.train(task, **given | options)


@dataclass(kw_only=True)
class Plain(Small):
    """Without a BatchNorm: shards may have one sample."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def two_players(world: World, run_dir: str) -> list[list[float]]:
    """Two models, one updated in the middle of the step; the shards are gone through three times."""
    spec = instep.TrainSpec(exact=True, shards=5, batch_size=13, steps=6, seed=2)
    with open_run(world, spec, RunDirectory(Path(run_dir)), "loop") as run:
        one, first = run.prepare(nn.Linear(6, 6), lambda p: torch.optim.SGD(p, lr=0.1))
        two, _ = run.prepare(nn.Linear(6, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        for step in run.steps(Small().train_data()[0].float()):
            for x in step.shards():
                step.backward(F.dropout(two(one(x)), 0.2).square().mean())
            step.update(first)
            for goal in (1.0, 2.0):  # two passes make one gradient
                for x in step.shards():
                    step.backward((two(one(x)) - goal).square().mean())
            step.finish()
        make_result(run, 0.0, 0)
        return [p.flatten().tolist() for p in (*one.parameters(), *two.parameters())]


def test_two_models_and_several_passes(tmp_path: Path) -> None:
    alone = two_players(World.join(Place()), str(tmp_path / "1"))
    for world_size in (2, 3, 5):
        assert run_ranks(two_players, world_size, str(tmp_path / str(world_size))) == [alone] * world_size


def with_another_group(world: World, run_dir: str, in_the_middle: bool) -> list[list[float]]:
    """Train a second layer from step 3 on."""
    spec = instep.TrainSpec(exact=True, shards=5, batch_size=13, steps=6, seed=2)
    with open_run(world, spec, RunDirectory(Path(run_dir)), "loop") as run:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
        model, optimizer = run.prepare(model, lambda _: torch.optim.SGD(model[0].parameters(), lr=0.1))
        for step in run.steps(Small().train_data()[0].float()):
            for x in step.shards():
                step.backward(model(x).square().mean())
            if in_the_middle and step.number == 2:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            step.finish()
            if not in_the_middle and step.number == 2:
                optimizer.add_param_group({"params": list(model[1].parameters())})
        make_result(run, 0.0, 0)
        return [p.flatten().tolist() for p in model.parameters()]


def test_a_group_of_parameters_that_is_added_later(tmp_path: Path) -> None:
    alone = with_another_group(World.join(Place()), str(tmp_path / "1"), False)
    for world_size in (2, 3):
        results = run_ranks(with_another_group, world_size, str(tmp_path / str(world_size)), False)
        assert results == [alone] * world_size
    with pytest.raises(TaskError, match="in the middle of a step"):
        with_another_group(World.join(Place()), str(tmp_path / "middle"), True)


class Lazy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = torch.ones(())
        return super().forward(x) * self.scale


@dataclass(kw_only=True)
class LazyBuffer(Small):
    def model(self) -> nn.Module:
        return Lazy().double()


def test_a_buffer_that_comes_into_being_in_a_forward_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="buffer 'scale' of a Lazy is created in its forward pass"):
        train(LazyBuffer(), tmp_path)


@dataclass(kw_only=True)
class Poisoned(Small):
    """A NaN in one sample: that step is skipped, statistics and all."""

    num_samples: int = 44

    def train_data(self) -> Any:
        x, y = super().train_data()
        x[17] = float("nan")
        return x, y


def poisoned(world: World, run_dir: str) -> tuple[str, list[bool]]:
    spec = instep.TrainSpec(exact=True, shards=4, batch_size=12, steps=9, on_nan="skip", eval_every="never")
    result = worker_main(world, Poisoned(), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    return result.weights_sha256, [e.get("skipped", False) for e in read_events(Path(run_dir)) if e["event"] == "step"]


def test_a_step_with_a_nan_is_skipped_alike(tmp_path: Path) -> None:
    sha, skipped = poisoned(World.join(Place()), str(tmp_path / "1"))
    assert 0 < sum(skipped) < len(skipped)
    for world_size in (2, 3):
        assert run_ranks(poisoned, world_size, str(tmp_path / str(world_size)))[0] == (sha, skipped)


class Score:
    """A metric object with a float to be summed."""

    def __init__(self, values: torch.Tensor) -> None:
        self.total = values.sum(dtype=torch.float32)
        self.count = torch.tensor(len(values))

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> torch.Tensor:
        return self.total / self.count


@dataclass(kw_only=True)
class Scored(Plain):
    kept: bool = False

    def metrics(self, model: Any, batch: Any) -> Any:
        values = model(batch[0]).exp().amax(1)
        if not self.kept:
            return {"score": Score(values)}
        self.__dict__.setdefault("score", Score(values)).update(values)
        return {"score": self.__dict__["score"]}


def scored(world: World, run_dir: str, kept: bool) -> float:
    spec = instep.TrainSpec(exact=True, batch_size=10, steps=2)
    return worker_main(world, Scored(kept=kept), spec, RunDirectory(Path(run_dir))).metrics["score"]


def test_metric_objects_have_the_same_bits(tmp_path: Path) -> None:
    alone = scored(World.join(Place()), str(tmp_path / "1"), False)
    for world_size in (2, 3, 4):
        assert run_ranks(scored, world_size, str(tmp_path / str(world_size)), False) == [alone] * world_size
    with pytest.raises(TaskError, match="return a new one for each batch"):
        scored(World.join(Place()), str(tmp_path / "kept"), True)


@dataclass(kw_only=True)
class Nondeterministic(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        out = model(x)
        out.put_(torch.tensor([0]), out.detach()[0, :1])
        return F.cross_entropy(out, y)


@dataclass(kw_only=True)
class Drawing(Plain):
    """Draws noise in evaluations too: torch's in the loss, as a VAE does, and the others' in the metrics."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x + torch.randn_like(x)), y)

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"drawn": torch.full((len(batch[1]),), random.random() + float(numpy.random.random()))}


def drawn(world: World, run_dir: str) -> list[dict[str, float]]:
    spec = instep.TrainSpec(exact=True, shards=5, batch_size=13, steps=4, eval_every="2", seed=2)
    worker_main(world, Drawing(), spec, RunDirectory(Path(run_dir)))
    return [event["metrics"] for event in read_events(Path(run_dir)) if event["event"] == "eval"]


def test_noise_in_an_evaluation_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    first, second = alone = drawn(World.join(Place()), str(tmp_path / "1"))
    assert first["drawn"] != second["drawn"]  # each evaluation draws anew
    for world_size in (2, 3):
        assert run_ranks(drawn, world_size, str(tmp_path / str(world_size)))[0] == alone


def test_an_evaluation_leaves_the_generators_as_they_were(tmp_path: Path) -> None:
    spec = instep.TrainSpec(batch_size=13, steps=4)
    with open_run(World.join(Place()), spec, RunDirectory(tmp_path), "loop") as run:
        run.prepare(Plain().model(), Plain().optimizer)
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        run.evaluate(lambda model, batch: {"x": torch.rand(len(batch))}, Plain().eval_data()[0])
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"an operation of this Task has none: put_ .*(?s:.*)without --exact"):
        train(Nondeterministic(), tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="by the way"), deterministic():
        raise RuntimeError("by the way")


def test_shards_are_part_of_the_recipe(tmp_path: Path) -> None:
    train(Plain(), tmp_path, epochs=1, batch_size=20)
    with pytest.raises(CheckpointError, match="shards: 16 there, 8 now"):
        train(Plain(), tmp_path, batch_size=20, shards=8)
    with pytest.raises(CheckpointError, match="exact: True there, False now"):
        train(Plain(), tmp_path, batch_size=20, exact=False, threads=1)
    assert train(Plain(), tmp_path, batch_size=20, shards=16, threads=1).epochs == 2  # what it was, said aloud


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 4}, "shards=4 is for exact mode, which is off. Add --exact"),
        ({"exact": True, "shards": 0}, "shards=0 is too small"),
        ({"exact": True, "shards": 11, "batch_size": 10}, "cannot be split into shards=11"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        instep.TrainSpec(**options)


def test_more_ranks_than_shards_are_refused() -> None:
    spec = instep.TrainSpec(exact=True, batch_size=20)
    spec.check_world(10)
    with pytest.raises(SpecError, match=r"a batch of 20 in shards of 2 has 10 shards.*at most 10 processes"):
        spec.check_world(11)


def test_shards_of_one_sample_are_refused_by_batch_norm(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"one value per channel has no variance. Use --drop-last, fewer --shards"):
        train(Small(), tmp_path, batch_size=10)


def test_running_statistics_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    exact = train(Small(num_samples=44), tmp_path / "exact", batch_size=12, shards=4, steps=1, epochs=None).load_model()
    normal = train(
        Small(num_samples=44), tmp_path / "normal", batch_size=12, exact=False, steps=1, epochs=None
    ).load_model()
    torch.testing.assert_close(exact[1].running_mean, normal[1].running_mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(exact[1].running_var, normal[1].running_var, rtol=1e-12, atol=1e-14)
    assert exact[1].num_batches_tracked == 1


def test_another_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(Plain(), tmp_path, epochs=1)
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    train(Plain(), tmp_path, epochs=2)
    notices = [e["text"] for e in read_events(tmp_path) if e["event"] == "notice"]
    assert [text for text in notices if "torch 9.9.0 instead of" in text], json.dumps(notices)
