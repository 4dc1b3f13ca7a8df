"""A run that pauses where it is told, and one that continues a copied checkpoint with other hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import instep
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.fork import fork_checkpoint
from instep.checkpoint.manifest import FORK
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.train.fork import Fork, build, rebase
from instep.train.result import Result
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from tasks import made_up

STEPS, PAUSE = 12, 5


@dataclass(kw_only=True)
class Switched(instep.Task):
    """The learning rate is multiplied by `factor` from a step on."""

    lr: float = 0.0625
    momentum: float = 0.5
    factor: float = 1.0
    plan: str = "switch"
    dies_at: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        assert num_steps == STEPS, "the schedule is that of the whole run"
        if self.plan == "none":
            return None
        return LambdaLR(optimizer, lambda step: (self.factor if step >= PAUSE else 1.0) * 0.75**step)

    def train_data(self) -> Any:
        return made_up(20, dtype=torch.float32)

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(run_dir: Path, **fields: Any) -> Result:
    options = {"steps": STEPS, "batch_size": 8, "exact": True, "save_every": "never", "keep": 1}
    options |= {name: fields.pop(name) for name in ("pause_at", "save_every") if name in fields}
    spec = TrainSpec(**options)
    with process_settings(spec, 1), World.join(Place()) as world:
        return worker_main(world, Switched(**fields), spec, RunDirectory(run_dir))


def fork(source: Path, target: Path, **origin: float) -> RunDirectory:
    directory = RunDirectory.open(target)
    checkpoint, _ = RunDirectory(source).newest()
    assert checkpoint is not None
    fork_checkpoint(checkpoint, directory.checkpoints, origin)
    directory.mark_fork({"run": str(source), "step": checkpoint.step, "fields": origin})
    return directory


@pytest.mark.parametrize("pause_at", [str(PAUSE), "2epochs"])
def test_a_run_pauses_and_continues_to_the_same_bits(tmp_path: Path, pause_at: str) -> None:
    straight = train(tmp_path / "straight", factor=2.0)
    paused = train(tmp_path / "run", factor=2.0, pause_at=pause_at)
    assert (paused.status, paused.steps) == ("preempted", 6 if pause_at == "2epochs" else PAUSE)
    again = train(tmp_path / "run", factor=2.0, pause_at=pause_at)
    assert (again.status, again.steps) == (paused.status, paused.steps), "it is there already"
    continued = train(tmp_path / "run", factor=2.0)
    assert (continued.status, continued.weights_sha256) == ("complete", straight.weights_sha256)
    assert train(tmp_path / "late", factor=2.0, pause_at="99").status == "complete"


@pytest.mark.parametrize("plan", ["switch", "none"])
def test_a_fork_has_the_bits_of_a_run_whose_learning_rate_changed_there(tmp_path: Path, plan: str) -> None:
    """Momentum, step and data order continue, and the new value holds from the first step on."""
    train(tmp_path / "first", pause_at=str(PAUSE), plan=plan)
    fork(tmp_path / "first", tmp_path / "same", lr=0.0625)
    fork(tmp_path / "first", tmp_path / "twice", lr=0.0625)
    same = train(tmp_path / "same", plan=plan)
    twice = train(tmp_path / "twice", lr=0.125, plan=plan)
    assert same.weights_sha256 == train(tmp_path / "first", plan=plan).weights_sha256
    assert twice.weights_sha256 != same.weights_sha256
    if plan == "switch":  # powers of two: scaling is exact
        assert twice.weights_sha256 == train(tmp_path / "straight", factor=2.0).weights_sha256


def test_a_fork_that_was_killed_continues_as_it_began(tmp_path: Path) -> None:
    train(tmp_path / "first", pause_at=str(PAUSE))
    for name in ("straight", "killed"):
        fork(tmp_path / "first", tmp_path / name, lr=0.0625, momentum=0.5)
    new = {"lr": 0.09, "momentum": 0.8}
    straight = train(tmp_path / "straight", **new)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", dies_at=9, save_every="1", **new)
    newest, _ = RunDirectory(tmp_path / "killed").newest()
    assert newest is not None
    assert FORK not in newest.parts
    assert newest.part("optimizer")["param_groups"][0]["momentum"] == 0.8
    assert train(tmp_path / "killed", **new).weights_sha256 == straight.weights_sha256


def test_a_fork_without_its_checkpoint_does_not_start_over(tmp_path: Path) -> None:
    train(tmp_path / "first", pause_at=str(PAUSE))
    directory = fork(tmp_path / "first", tmp_path / "copy", lr=0.0625)
    before = Checkpoint(RunDirectory(tmp_path / "first").newest()[0].path)  # type: ignore[union-attr]
    assert before.part("progress")["step"] == PAUSE
    (directory.checkpoints / f"step-{PAUSE:08d}" / "state.json").write_text("{}")  # a link would change both
    with pytest.raises(CheckpointError, match="continues another run, and no good checkpoint is left"):
        train(tmp_path / "copy", lr=0.1)
    assert Checkpoint(before.path).parts == before.parts


def test_where_to_pause() -> None:
    for text in ("soon", "10m", "never"):
        with pytest.raises(SpecError, match="pause_at"):
            TrainSpec(pause_at=text)


SCHEDULES: dict[str, Any] = {
    "lambda": lambda o, n: LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
    "step": lambda o, n: StepLR(o, 4, 0.5),
    "cosine": CosineAnnealingLR,
    "one cycle": lambda o, n: OneCycleLR(o, max_lr=o.param_groups[0]["lr"] * 8, total_steps=n),
    "two": lambda o, n: SequentialLR(o, [StepLR(o, 2, 0.5), CosineAnnealingLR(o, n)], [4]),
    "plateau": lambda o, n: ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_the_new_learning_rate(name: str) -> None:
    """As if it had been the learning rate from the beginning, for every schedule that multiplies it."""
    parameters = [nn.Parameter(torch.zeros(2))]

    def makers(lr: float) -> Fork:
        return Fork(lambda params: torch.optim.SGD(params, lr=lr), SCHEDULES[name])

    def after(lr: float, num_steps: int, state: Any = None) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        scheduler = SCHEDULES[name](optimizer, 20)
        if state is not None:
            scheduler.load_state_dict(state[1])
            optimizer.param_groups[0].update(state[0])
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
        return dict(optimizer.param_groups[0]), scheduler.state_dict()

    group, state = after(0.1, 7)
    earlier, new = (build(makers(lr), parameters, 20) for lr in (0.1, 0.3))
    group.pop("params")
    moved = rebase(group, earlier.groups[0], new.groups[0]), rebase(state, earlier.schedule, new.schedule)
    expected = after(0.3, 12)[0]["lr"]
    assert math.isclose(after(0.3, 5, moved)[0]["lr"], expected, rel_tol=1e-12)
    assert rebase(group, earlier.groups[0], earlier.groups[0]) == group
