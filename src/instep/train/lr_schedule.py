"""Learning-rate schedules: torch's schedulers as they are, and the usual ones by name.

[Note: When a schedule steps]
Schedules count global steps (C6), also those that were skipped. One that counts epochs is returned with its interval,
{"scheduler": scheduler, "interval": "epoch"}. ReduceLROnPlateau steps with each evaluation: it is given the metric that
--stop-when or --keep-best names, or, where less is better, the evaluation's loss. Metrics are exact, so that all ranks
make the same decision at any world size.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from instep.core.errors import TaskError
from instep.core.metric_goal import MetricGoal
from instep.core.spec import TrainSpec

MakeScheduler = Callable[[torch.optim.Optimizer, int], Any]
_INTERVALS = ("step", "epoch")


class LrSchedule:
    """A scheduler, and when it steps."""

    def __init__(self, scheduler: Any, interval: str) -> None:
        self.scheduler = scheduler
        self._interval = interval

    @classmethod
    def of(cls, made: Any) -> LrSchedule | None:
        """Return the schedule for what a Task's `scheduler` returned; None: there is none."""
        if made is None:
            return None
        interval = "step"
        if isinstance(made, Mapping):
            if "scheduler" not in made or made.get("interval", "step") not in _INTERVALS or len(made) > 2:
                raise TaskError(
                    f"scheduler returned {dict(made)!r:.120}. A dict has a scheduler and its interval: "
                    '{"scheduler": scheduler, "interval": "epoch"}, or "step".'
                )
            made, interval = made["scheduler"], made.get("interval", "step")
        return cls(made, "evaluation" if isinstance(made, ReduceLROnPlateau) else interval)

    @property
    def wants_metric(self) -> bool:
        """Whether it steps with evaluations."""
        return self._interval == "evaluation"

    def end_update(self, applied: bool, ends_epoch: bool) -> None:
        """Count a step; `applied`: whether the model was updated in it."""
        if self._interval == "step" or (self._interval == "epoch" and ends_epoch):
            with warnings.catch_warnings() if not applied else contextlib.nullcontext():
                if not applied:  # torch misses the update; the schedule counts steps, made or skipped
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.scheduler.step()

    def end_evaluation(self, metrics: Mapping[str, float], goal: MetricGoal | None) -> None:
        """Take the metrics of an evaluation; `goal`: the one that the spec names."""
        if self.wants_metric:
            name = self.metric(goal)
            # Of several evaluation sets, the first one's.
            self.scheduler.step(next(metrics[full] for full in metrics if full == name or full.endswith(f"/{name}")))

    def metric(self, goal: MetricGoal | None) -> str:
        """Return the metric by which it steps."""
        is_lowest_best = self.scheduler.mode == "min"
        if goal is not None and goal.is_lowest_best == is_lowest_best:
            return goal.name
        if is_lowest_best:
            return "eval_loss"
        raise TaskError(
            "ReduceLROnPlateau(mode='max') needs a metric of which more is better. Name it: --keep-best METRIC, or "
            "--stop-when METRIC."
        )


def check_schedule(schedule: LrSchedule | None, goal: MetricGoal | None, evaluates: bool) -> None:
    """Raise TaskError for a schedule that wants a metric, and would be given none in the course of the run."""
    if schedule is not None and schedule.wants_metric:
        schedule.metric(goal)
        if not evaluates:
            raise TaskError(
                "ReduceLROnPlateau steps with each evaluation, and there is none in the course of this run. Give the "
                "Task an eval_data(), and --eval-every an interval."
            )


def schedule_of(spec: TrainSpec, own: MakeScheduler | None) -> MakeScheduler | None:
    """Return what makes the scheduler: the Task's own, or the one that the spec names."""
    if spec.lr_schedule == "task":
        return own
    if own is not None:
        raise TaskError(
            f"the Task has a scheduler, and lr_schedule={spec.lr_schedule} asks for another one. Leave --lr-schedule "
            "and --warmup out, or the Task's scheduler()."
        )
    return functools.partial(_named, spec.lr_schedule, spec.warmup)


def _named(name: str, warmup: int, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, functools.partial(factor_at, name, warmup, num_steps))


def factor_at(name: str, warmup: int, num_steps: int, step: int) -> float:
    """Return what the learning rate is multiplied by in a step, counted from 0."""
    if step < warmup:
        return (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}[name]
