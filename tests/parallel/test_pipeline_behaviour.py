"""What else a pipeline must do: take little memory, refuse loops it cannot run, skip bad steps, stop when asked."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import InstepError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.parallel.capture import Call
from instep.train.loop import Loop
from instep.train.task import Task
from instep.train.worker import open_run
from instep.world.world import World
from ranks import run_ranks

WIDTH = 32


class Layered(nn.Module):
    """Cannot be traced, and gives a dict; its layers must be named."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.isnan().all():
            raise ValueError("no numbers at all")
        for block in (self.begin, *self.blocks):
            x = block(x, gain) if block == self.begin else block(x)
        return self.finish(x)

    def begin(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return self.start(x) * gain

    def finish(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(x)}


@dataclass(kw_only=True)
class Named(Task):
    """Names the layers; its batch has a number that all rows share, and texts."""

    bad: int | None = None
    ask_at: int | None = None

    def model(self) -> nn.Module:
        return Layered().double()

    def layers(self, model: Any) -> list[Any]:
        return [model.begin, *model.blocks, model.finish]

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-2)

    def train_data(self) -> Any:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(3)).double()
        if self.bad is not None:
            x[self.bad] = float("inf")
        return list(zip(x, torch.arange(40) % 3, map(str, range(40)), strict=True))

    def eval_data(self) -> Any:
        return self.train_data()[:11] if self.bad is None else None

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        x, y, names = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y), "names": list(names), "gain": torch.tensor(1.5).double()}

    def loss(self, model: Any, batch: Any) -> Any:
        out = model(batch["x"], gain=batch["gain"])["logits"]
        assert [str(int(name)) for name in batch["names"]] == batch["names"]
        assert len(batch["names"]) == len(out)
        return F.cross_entropy(out, batch["y"])

    def metrics(self, model: Any, batch: Any) -> Any:
        out = model(batch["x"], batch["gain"])
        return {"accuracy": out["logits"].argmax(1) == batch["y"]}

    def on_step(self, record: Any) -> None:
        if record.step == self.ask_at:
            os.kill(os.getpid(), signal.SIGTERM)


def spec_of(world: World, **options: Any) -> TrainSpec:
    piped: dict[str, Any] = {"strategy": "pipeline"} if world.world_size > 1 else {}
    return TrainSpec(**{"steps": 6, "batch_size": 10, "save_every": "never", "seed": 1, "threads": 1} | piped | options)


def in_run(world: World, spec: TrainSpec, act: Any) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(world.broadcast_object(scratch))
        with open_run(world, spec, RunDirectory(run_dir), "test") as run:
            result = act(run)
        world.barrier()
        events = list(read_events(run_dir))
        world.barrier()
    return result, events


def train(world: World, task: Task, **options: Any) -> tuple[Any, Any]:
    """Train, and give losses, metrics, and the bytes that a rank holds."""

    def act(run: Any) -> Any:
        Loop(run, task).run()
        trained = run.engine.trained[0]
        tensors = [*trained.model.parameters(), *(p.grad for p in trained.model.parameters() if p.grad is not None)]
        for state in trained.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return run.metrics, sum(t.numel() * t.element_size() for t in tensors)

    result, events = in_run(world, spec_of(world, **options), act)
    return result, [e for e in events if e["event"] in ("step", "notice")]


def steps_of(events: list[Any]) -> list[float]:
    return [e["loss"] for e in events if e["event"] == "step"]


def own_loop(world: World) -> str:
    def act(run: Any) -> Any:
        task = Named()
        model, _ = run.prepare(task.model(), task.optimizer, example=lambda: example_of(task), layers=task.layers)
        for step in run.steps(task.train_data(), collate=task.collate):
            for batch in step.shards():
                step.backward(task.loss(model, batch))
            step.finish()

    try:
        in_run(world, spec_of(world), act)
    except InstepError as error:
        return str(error)
    return ""


def computed_loop(world: World) -> Any:
    """A loop of one's own that leaves it to the step, without an example of the call."""
    losses: list[float] = []

    def act(run: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).double()
        model, _ = run.prepare(net, lambda params: torch.optim.SGD(params, lr=0.1))
        data = torch.randn(12, 4, generator=torch.Generator().manual_seed(3)).double(), torch.arange(12) % 3
        for step in run.steps(data, batch_size=5, epochs=2):
            step.compute(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
            losses.append(step.finish().loss)

    in_run(world, spec_of(world, steps=None), act)
    return losses


def example_of(task: Named) -> Call:
    batch = task.collate(task.train_data()[:2])
    return Call((batch["x"],), {"gain": batch["gain"]})


def stop_in_the_middle(world: World) -> Any:
    task = Named(ask_at=3 if world.is_main else None)
    try:
        train(world, task)
    except SystemExit as preempted:
        return preempted.code
    return "went on"


def loss_not_finite(world: World) -> str:
    try:
        train(world, Named(bad=7))
    except InstepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def behaviour(world: World) -> dict[str, Any]:
    result: dict[str, Any] = {"named": train(world, Named()), "skip": train(world, Named(bad=7), on_nan="skip")}
    result["computed"] = computed_loop(world)
    if world.world_size > 1:
        result["interleaved"] = train(world, Named(), schedule="interleaved", microbatches=4)
        result["own loop"] = own_loop(world)
        result["stopped"] = stop_in_the_middle(world)
        result["not finite"] = loss_not_finite(world)
    return result


@functools.cache
def alone() -> dict[str, Any]:
    return behaviour(World.join(Place()))


@functools.cache
def piped() -> list[dict[str, Any]]:
    return run_ranks(behaviour, 2)


@pytest.mark.parametrize("name", ["named", "interleaved"])
def test_named_layers_and_batches_that_are_not_all_rows(name: str) -> None:
    (metrics, _), events = alone()["named"]
    for rank in piped():
        (result, _), found_events = rank[name]
        assert result == pytest.approx(metrics, rel=1e-9)
        assert len(steps_of(found_events)) == 6
        assert steps_of(found_events) == pytest.approx(steps_of(events), rel=1e-9)


def test_memory_of_a_rank() -> None:
    """Parameters, gradients and optimizer state."""
    (_, whole), _ = alone()["named"]
    for rank in piped():
        (_, own), _ = rank["named"]
        assert own <= 0.6 * whole


def test_an_own_loop_is_told_what_to_use() -> None:
    for rank in piped():
        assert "Use step.compute(model, loss_of) in place of" in rank["own loop"]


def test_an_own_loop_that_uses_it() -> None:
    for rank in piped():
        assert rank["computed"] == pytest.approx(alone()["computed"], rel=1e-9)


def test_a_step_that_is_not_finite_is_skipped_on_all_stages() -> None:
    _, events = alone()["skip"]
    expected = [(e["step"], e.get("skipped", False)) for e in events if e["event"] == "step"]
    assert any(skipped for _, skipped in expected)
    for rank in piped():
        _, result = rank["skip"]
        steps = [e for e in result if e["event"] == "step"]
        assert [(e["step"], e.get("skipped", False)) for e in steps] == expected
        finite = [e["loss"] for e in steps if not e.get("skipped")]
        assert finite == pytest.approx(
            [e["loss"] for e in events if e["event"] == "step" and not e.get("skipped")], rel=1e-9
        )


def test_a_loss_that_is_not_finite_ends_all_stages() -> None:
    for rank in piped():
        assert rank["not finite"].startswith("NumericsError")
        assert "strategy=ddp" in rank["not finite"]


def test_one_stage_that_is_asked_to_stop_stops_all() -> None:
    assert [rank["stopped"] for rank in piped()] == [0, 0]
