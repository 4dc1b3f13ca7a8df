"""`--find lr`: a range test. The learning rate grows in every step until the loss diverges.

The loss of a step is the mean over its global batch, so the curve does not depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.events.schema import StepRecord
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.tune.finders.candidates import read_range
from instep.tune.finders.finder import Finder, Finding, FindRequest, Plot, Series
from instep.tune.finders.lr_curve import LrChoice, choose, has_diverged, rates
from instep.tune.finders.lr_field import find_lr_field, lr_of
from instep.tune.finders.probe import probing, train_probe
from instep.tune.finders.scratch import Progress, launch_in, scratch_folder, short_spec

LOWEST, HIGHEST = 1e-7, 10.0
NUM_STEPS, FEWEST_STEPS = 100, 20
_PROGRESS_S = 2.0


@dataclass(frozen=True)
class RangeTest:
    """What a range test found."""

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    base_lr: float
    """The optimizer's own learning rate."""
    field: str | None
    """The field of the Task that sets it."""


class LrFinder(Finder):
    """Finds a learning rate."""

    def check(self, request: FindRequest) -> None:
        """Raise SpecError for a range without rates, or for too few steps."""
        read_range(request.over, LOWEST, HIGHEST, "learning rates")
        steps = request.spec.steps
        if steps is not None and steps < FEWEST_STEPS:
            raise SpecError(f"steps={steps} are too few to see a curve. Use at least {FEWEST_STEPS}.")
        request.spec.check_world(request.processes)

    def find(self, request: FindRequest) -> Finding:
        """Run the test on new processes, and suggest a learning rate."""
        self.check(request)
        low, high = read_range(request.over, LOWEST, HIGHEST, "learning rates")
        num_steps = request.spec.steps or NUM_STEPS
        request.say(f"a range test of {num_steps} steps, learning rates from {low:.2g} to {high:.2g}")
        # A loss that is not finite ends the test, not the process.
        spec = short_spec(request.spec, steps=num_steps, on_nan="skip", lr_schedule="task", warmup=0, ema=None)
        with scratch_folder() as folder:
            args = (request.source, spec, str(folder), low, high)
            test = RangeTest(**launch_in(folder, range_main, args, spec, request.say))
        return make_finding(test, choose(test.lrs, test.losses), request.source)


def range_main(
    attempt: int, source: TaskSource, spec: TrainSpec, folder: str, low: float, high: float
) -> dict[str, Any]:
    """Run a rank of a range test; return the test as plain values."""
    del attempt
    assert spec.steps is not None
    lrs = rates(low, high, spec.steps)
    with probing(source, spec) as (world, task):
        ranged = _Ranged(task, lrs, Progress(Path(folder), world.is_main))
        steps = train_probe(world, task, spec, Path(folder) / "run", ranged.methods(), ranged.follow)
    test = RangeTest(tuple(lrs[: len(steps)]), tuple(step.loss for step in steps), ranged.base_lr, ranged.field)
    return dataclasses.asdict(test)


class _Ranged:
    """The methods of a Task whose learning rate grows in every step."""

    def __init__(self, task: Task, lrs: list[float], progress: Progress) -> None:
        self.base_lr = 0.0
        self.field: str | None = None
        self._make = type(task).optimizer
        self._lrs = lrs
        self._losses: list[float] = []
        self._progress = progress

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return what replaces methods of the Task."""

        def optimizer(task: Task, params: Any) -> torch.optim.Optimizer:
            made = self._make(task, params)
            self.base_lr, self.field = lr_of(made), find_lr_field(task, self._make, params)
            return made

        def scheduler(_task: Task, optimizer: torch.optim.Optimizer, _num_steps: int) -> LambdaLR:
            return LambdaLR(optimizer, lambda step: self._lrs[min(step, len(self._lrs) - 1)] / self.base_lr)

        def stop(_task: Task, _record: StepRecord) -> bool:
            return has_diverged(self._losses)

        return {"optimizer": optimizer, "scheduler": scheduler, "stop": stop}

    def follow(self, record: StepRecord) -> None:
        """Take the record of a step; on rank 0."""
        self._losses.append(record.loss)
        text = f"step {record.step}/{len(self._lrs)}  lr {record.lr:.2g}  loss {record.loss:.4g}"
        self._progress.say(text, every_s=_PROGRESS_S)


def make_finding(test: RangeTest, choice: LrChoice, source: TaskSource) -> Finding:
    """Return the finding for a test and what its curve suggests."""
    values, sentences = {}, []
    if choice.lr is None:
        sentences.append(f"No learning rate can be suggested: {choice.reason}.")
    else:
        sentences.append(f"Use a learning rate of {choice.lr:g}: {choice.reason}.")
        if test.field is None:
            sentences.append(
                f"No field of {source.class_name} sets the learning rate of its optimizer, which is {test.base_lr:g}: "
                "change it in optimizer(), or make it a field."
            )
        else:
            values = {test.field: _value_of(test, choice.lr, source)}
    marks = [(lr, text) for lr, text in ((choice.steepest, "falls fastest"), (choice.lr, "suggested")) if lr]
    series = [Series("loss", test.lrs, test.losses)]
    if choice.smoothed:
        series.append(Series("smoothed", test.lrs[: len(choice.smoothed)], choice.smoothed))
    measured = {
        "steepest": choice.steepest,
        "tenth_of_minimum": choice.tenth,
        "field": test.field,
        "optimizer_lr": test.base_lr,
        "lrs": list(test.lrs),
        "losses": [loss if math.isfinite(loss) else None for loss in test.losses],  # JSON has no NaN
        "smoothed": list(choice.smoothed),
    }
    plot = Plot("loss by learning rate", "learning rate", series, marks)
    return Finding("lr", choice.lr, tuple(sentences), values=values, measured=measured, plots=(plot,))


def _value_of(test: RangeTest, lr: float, source: TaskSource) -> float:
    """Return the field's value that gives the optimizer a learning rate, which is proportional to it."""
    assert test.field is not None
    task = source.load() if source.payload else None
    value = float(source.values[test.field] if task is None else getattr(task, test.field))
    return lr if value == test.base_lr else float(f"{value * lr / test.base_lr:.4g}")
