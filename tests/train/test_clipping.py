"""Clipping by value, and the gradient's norm in the log: the same under any strategy, in exact mode to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.errors import NumericsError, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import made_up

LIMIT = 0.02


@dataclass(kw_only=True)
class Clipped(instep.Task):
    infinite_at: int = 0
    dies_at: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    def train_data(self) -> Any:
        return made_up(43)

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
        output = model(batch[0])
        loss = F.cross_entropy(output, batch[1])
        # Finite itself, and its gradient is not.
        return loss + (output - output.detach()).square().sum().sqrt() if self.calls == self.infinite_at else loss

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    spec = TrainSpec(**{"batch_size": 8, "steps": 8, "seed": 5, "threads": 1, "save_every": "never", **options})
    with process_settings(spec, world.world_size):
        result = worker_main(world, Clipped(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    steps = {event["step"]: event for event in read_events(Path(run_dir)) if event["event"] == "step"}
    return {
        "losses": [event["loss"] for event in steps.values()],
        "norms": [event.get("grad_norm") for event in steps.values()],
        "sha256": result.weights_sha256,
    }


def alone(run_dir: Path, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return train(World.join(Place()), str(run_dir), options, fields)


VALUE = {"clip_value": LIMIT, "log_grad_norm": True}


def by_hand(run_dir: Path) -> dict[str, torch.Tensor]:
    """Clip with torch's own function; return the weights."""
    task = Clipped()
    with instep.start(seed=5, run_dir=str(run_dir), save_every="never") as run:
        model, optimizer = run.prepare(task.model(), task.optimizer)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_value_(model.parameters(), LIMIT)

        optimizer.register_step_pre_hook(clip)
        for step in run.steps(task.train_data(), batch_size=8, steps=8):
            step.compute(model, task.loss)
            step.finish()
    return load_weights(run_dir)


def test_torchs_own_numbers(tmp_path: Path) -> None:
    alone(tmp_path / "option", VALUE)
    weights, expected = load_weights(tmp_path / "option"), by_hand(tmp_path / "hand")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    alone(tmp_path / "without", {})
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in load_weights(tmp_path / "without").items())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    run_dir = tmp_path_factory.mktemp("alone")
    return alone(run_dir, VALUE), load_weights(run_dir)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_under_every_strategy(strategy: str, expected: Any, tmp_path: Path) -> None:
    answer = run_ranks(train, 2, str(tmp_path), {**VALUE, "strategy": strategy}, {})[0]
    assert answer["losses"] == pytest.approx(expected[0]["losses"], rel=1e-9)
    assert answer["norms"] == pytest.approx(expected[0]["norms"], rel=1e-9)
    for name, tensor in load_weights(tmp_path).items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=1e-9, atol=1e-9)


def test_the_same_bits_in_exact_mode_and_after_a_kill(tmp_path: Path) -> None:
    options = {**VALUE, "exact": True, "shards": 4}
    wanted = alone(tmp_path / "1", options)
    assert all(norm > LIMIT for norm in wanted["norms"])
    for world_size, strategy in ((2, "ddp"), (3, "fsdp")):
        more = {**options, "strategy": strategy}
        assert run_ranks(train, world_size, str(tmp_path / str(world_size)), more, {})[0] == wanted
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path / "killed", {**options, "save_every": "1"}, dies_at=5)
    assert alone(tmp_path / "killed", {**options, "save_every": "1"}) == wanted


def test_the_norm_is_logged_where_it_is_known(tmp_path: Path) -> None:
    plain, logged = alone(tmp_path / "plain", {}), alone(tmp_path / "logged", {"log_grad_norm": True})
    assert plain["norms"] == [None] * 8
    assert logged == {**plain, "norms": logged["norms"]}  # nothing else changes
    assert all(norm > 0 for norm in logged["norms"])
    for options in ({"clip_norm": 1e9}, {"on_nan": "skip"}):
        assert alone(tmp_path / next(iter(options)), options) == logged


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="the gradient of step 3 is not finite"):
        alone(tmp_path / "stops", {"log_grad_norm": True}, infinite_at=3)
    skipped = alone(tmp_path / "skips", {"clip_value": LIMIT, "on_nan": "skip"}, infinite_at=3)
    assert [norm is None for norm in skipped["norms"]] == [False, False, True, *[False] * 5]
    assert all(map(math.isfinite, skipped["losses"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_value": 0.0}, "would clip every gradient to zero"),
        ({"clip_value": 1.0, "clip_norm": 1.0}, "Give one of them"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        TrainSpec(**options)
