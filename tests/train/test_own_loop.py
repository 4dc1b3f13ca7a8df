"""A loop of one's own reaches the weights of the Task form, and is continued like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, TaskError
from instep.core.topology import Place
from instep.train.run import Run
from instep.train.worker import make_result, open_run, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

OPTIONS: dict[str, Any] = {
    "batch_size": 8,
    "epochs": 2,
    "seed": 4,
    "accumulate": 1,
    "save_every": "3",
    "threads": 1,
}


def own_loop(world: World, run_dir: str, stop_after: int | None = None) -> str:
    task = Small()
    spec = instep.TrainSpec(**OPTIONS)
    with open_run(world, spec, RunDirectory(Path(run_dir)), "loop") as run:
        model, _ = run.prepare(task.model(), lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
        for step in run.steps(task.train_data()):
            for x, y in step.shards():
                step.backward(F.cross_entropy(model(x), y))
            step.finish()
            if step.number == stop_after:
                break
        return make_result(run, 0.0, 0).weights_sha256


def task_form(world: World, run_dir: str) -> str:
    return worker_main(world, Small(), instep.TrainSpec(**OPTIONS), RunDirectory(Path(run_dir))).weights_sha256


@pytest.mark.parametrize("world_size", [1, 2])
def test_same_weights_as_the_task_form(world_size: int, tmp_path: Path) -> None:
    if world_size == 1:
        world = World.join(Place())
        assert own_loop(world, str(tmp_path / "a")) == task_form(world, str(tmp_path / "b"))
    else:
        ours = run_ranks(own_loop, world_size, str(tmp_path / "a"))
        theirs = run_ranks(task_form, world_size, str(tmp_path / "b"))
        assert set(ours) == set(theirs)
        assert len(set(ours)) == 1


def test_a_loop_that_was_left_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    world = World.join(Place())
    whole = own_loop(world, str(tmp_path / "whole"))
    own_loop(world, str(tmp_path / "parts"), stop_after=8)
    assert RunDirectory(tmp_path / "parts").names()[0] == "step-00000006"
    assert own_loop(world, str(tmp_path / "parts")) == whole


class Ema:
    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def with_average(run_dir: Path, epochs: int) -> float:
    """Train with instep.start and an average that is updated after `finish`."""
    ema = Ema()
    with instep.start(seed=1, run_dir=str(run_dir), save_every="1", threads=1) as run:
        model, _ = run.prepare(nn.Linear(6, 3).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        run.keep(ema=ema)
        for step in run.steps(Small().train_data(), batch_size=10, epochs=epochs):
            for x, y in step.shards():
                step.backward(F.cross_entropy(model(x), y))
            step.finish()
            ema.value = 0.9 * ema.value + 0.1 * model.weight.detach().sum()
    return float(ema.value)


def test_kept_objects_hold_what_the_body_did_after_finish(tmp_path: Path) -> None:
    whole = with_average(tmp_path / "whole", epochs=4)
    with_average(tmp_path / "parts", epochs=2)
    assert with_average(tmp_path / "parts", epochs=4) == whole


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    with_average(tmp_path, epochs=1)
    with (
        pytest.raises(CheckpointError, match="batch_size: 10 there, 12 now"),
        instep.start(seed=1, run_dir=str(tmp_path), save_every="1", threads=1) as run,
    ):
        run.prepare(nn.Linear(6, 3).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        next(iter(run.steps(Small().train_data(), batch_size=12, epochs=1)))


def two_players(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Two models, one of them updated in the middle of the step, as in a GAN."""
    one, first = run.prepare(nn.Linear(6, 6).double(), lambda p: torch.optim.SGD(p, lr=0.1))
    two, _ = run.prepare(nn.Linear(6, 1).double(), lambda p: torch.optim.SGD(p, lr=0.1))
    for step in run.steps(Small().train_data()[0], batch_size=9, steps=5):
        for x in step.shards():
            step.backward(two(one(x)).square().mean())
        step.update(first)
        for x in step.shards():
            step.backward((two(one(x)) - 1).square().mean())
        step.finish()
    return one.weight.detach().clone(), two.weight.detach().clone()


def test_two_models_with_an_update_in_between(tmp_path: Path) -> None:
    with instep.start(seed=1, run_dir=str(tmp_path), threads=1) as run:
        ours = two_players(run)
        indices = [run._reader.sample_indices(step) for step in range(5)]
    torch.manual_seed(0)
    with instep.start(seed=1, run_dir=str(tmp_path / "again"), threads=1):
        one, two = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
    data = Small().train_data()[0]
    for rows in indices:
        x = data[rows]
        gradients = torch.autograd.grad(two(one(x)).square().mean(), list(one.parameters()))
        with torch.no_grad():
            for p, g in zip(one.parameters(), gradients, strict=True):
                p -= 0.1 * g
        gradients = torch.autograd.grad((two(one(x)) - 1).square().mean(), list(two.parameters()))
        with torch.no_grad():
            for p, g in zip(two.parameters(), gradients, strict=True):
                p -= 0.1 * g
    torch.testing.assert_close(ours[0], one.weight.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours[1], two.weight.detach(), rtol=1e-12, atol=1e-14)


def test_a_step_that_is_not_finished_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match=r"step 1 was not finished"),
        instep.start(run_dir=str(tmp_path), threads=1) as run,
    ):
        run.prepare(nn.Linear(6, 3).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        for _ in run.steps(Small().train_data(), batch_size=10, epochs=1):
            pass
