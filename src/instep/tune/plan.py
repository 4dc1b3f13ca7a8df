"""The plan of a search: everything that is decided before it starts, and what each trial trains. Pure."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial

from instep.core.durations import seconds_of
from instep.core.errors import SpecError
from instep.core.metric_goal import MetricGoal
from instep.core.nearest import nearest
from instep.core.options import check_at_least, options_of
from instep.core.spec import TrainSpec
from instep.train.directory import describe_task
from instep.train.source import TaskSource
from instep.train.task import Task, field_names
from instep.tune.ledger import JOURNAL
from instep.tune.named import make_pruner, make_sampler
from instep.tune.objective import Constraint, read_goals
from instep.tune.packing import read_parallel
from instep.tune.place import TrialPlace, find_place
from instep.tune.promotion import read_rung_processes
from instep.tune.scheduler import PruningScheduler, TrialScheduler
from instep.tune.schedulers import scheduler_of
from instep.tune.space import Dimension, Range, field_value
from instep.tune.trial_run import TrialPlan

DEFAULT_METRIC = "eval_loss:min"
_COMPARED = ("epochs", "steps", "eval_every", "stop_when", "patience")
"""Operational options on which the values of trials depend."""


@dataclass(frozen=True, kw_only=True)
class TuneSpec:
    """How to search. The fields are options of `instep tune` and keywords of `instep.tune`."""

    trials: int = 30
    metric: str = DEFAULT_METRIC
    sampler: str = "tpe"
    pruner: str = "none"
    parallel: int | str = 1
    """Trials at the same time; auto: as many as fit."""
    time: str | None = None
    storage: str | None = None
    study: str | None = None
    constraints: tuple[str, ...] = ()
    points: tuple[Mapping[str, Any], ...] = ()
    """Parameters of the first trials."""
    rung_processes: str | None = None
    """With promotion, the number of processes of the trials at each rung."""
    gpus_per_trial: float | None = None
    """Where Ray places trials: GPUs of each; a fraction: trials share one. None: one for each process, if there are."""

    def __post_init__(self) -> None:
        check_at_least("trials", self.trials, 1)
        if (num_at_once := read_parallel(self.parallel)) is not None:
            check_at_least("parallel", num_at_once, 1)
        if self.time is not None and seconds_of(self.time) is None:
            raise SpecError(f"time={self.time!r} is not a time. Write for instance 90s, 30m or 2h.")
        if len(self.goals) > 1 and self.pruner.partition(":")[0] not in ("none", "nop"):
            raise SpecError(
                f"pruner={self.pruner} compares one metric, and metric={self.metric} names {len(self.goals)}. Leave "
                "--pruner out, or all metrics but one."
            )
        self.scheduler.check_name(self.pruner)
        if self.by_rung and not self.scheduler.has_rungs:
            raise SpecError(f"rung_processes={self.rung_processes} is for --pruner asha, which has rungs. Add it.")
        if self.gpus_per_trial is not None and not self.gpus_per_trial >= 0:
            raise SpecError(f"gpus_per_trial={self.gpus_per_trial} is not a number of GPUs. Use 0, 0.5, 1, …")

    @property
    def scheduler(self) -> type[TrialScheduler]:
        """What decides how far trials are trained."""
        return scheduler_of(self.pruner)

    @property
    def by_rung(self) -> tuple[int, ...]:
        """The number of processes at each rung, and at those that follow the last; empty: all have the same."""
        return read_rung_processes(self.rung_processes)

    @property
    def goals(self) -> tuple[MetricGoal, ...]:
        """The metrics, in order."""
        return read_goals(self.metric)

    @property
    def limits(self) -> tuple[Constraint, ...]:
        """The constraints."""
        return tuple(map(Constraint.parse, self.constraints))

    @property
    def is_shared(self) -> bool:
        """Whether several processes may search together."""
        return self.storage == JOURNAL

    @property
    def time_s(self) -> float | None:
        """How long to search; None: until all trials are done."""
        return None if self.time is None else seconds_of(self.time)


@dataclass(frozen=True)
class SearchPlan:
    """What is searched, of which Task, and how."""

    task: Task
    """With the values that are not searched."""
    file: Path | None
    """The file that defines it; None: it is passed to the workers by value."""
    spec: TrainSpec
    tune: TuneSpec
    space: Mapping[str, Dimension]
    seed: int

    def check(self) -> None:
        """Raise SpecError for what would fail in every trial; nothing has been started yet."""
        if not self.space and not self.suggests:
            known = ", ".join(field_names(type(self.task))) or "none"
            raise SpecError(
                f"there is nothing to search. Give a range or choices for a field of {type(self.task).__name__}, as "
                f"in lr=1e-5..1e-1:log or hidden=64,128, or define its search_space(trial). Its fields: {known}."
            )
        if self.spec.pause_at is not None:
            raise SpecError(f"pause_at={self.spec.pause_at} would end every trial there. Leave it out.")
        _ = self.tune.limits
        self.tune.scheduler.check(self)
        for point in self.tune.points:
            self._check_point(point)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trial = optuna.create_study(sampler=self.make_sampler(0)).ask()
        self.suggest(trial)
        self.trial(0, trial.params, Path())

    def _check_point(self, point: Mapping[str, Any]) -> None:
        for name, value in point.items():
            if name not in self.space:
                if not self.suggests:
                    raise SpecError(f"enqueue: {name} is not searched. Searched are {', '.join(self.space)}.")
            elif not self.space[name].contains(value):
                raise SpecError(f"enqueue: {name}={value!r} is not in {name}={self.space[name]}.")

    @property
    def suggests(self) -> bool:
        """Whether the Task has a space of its own."""
        return callable(getattr(self.task, "search_space", None))

    def _fixed_space(self) -> Mapping[str, Dimension] | None:
        return None if self.suggests else self.space

    def suggest(self, trial: Trial) -> None:
        """Suggest all parameters of a trial: those of the command line, then the Task's own."""
        for name, dimension in self.space.items():
            if not isinstance(dimension, Range):
                trial.suggest_categorical(name, dimension.choices)
            elif dimension.is_int:
                low, high, step = int(dimension.low), int(dimension.high), int(dimension.step or 1)
                trial.suggest_int(name, low, high, step=step, log=dimension.log)
            else:
                trial.suggest_float(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)
        if self.suggests:
            self.task.search_space(trial)

    def make_sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Return the sampler of a trial."""
        return make_sampler(self.tune.sampler, self.seed, number, self._fixed_space())

    def make_pruner(self) -> optuna.pruners.BasePruner:
        """Return a pruner; where another scheduler decides, it prunes nothing."""
        return make_pruner(self.tune.pruner if self.tune.scheduler is PruningScheduler else "none")

    def place(self) -> TrialPlace:
        """Return where the trials run."""
        return find_place(self.spec, read_parallel(self.tune.parallel), self.tune.gpus_per_trial)

    def trial(self, number: int, params: Mapping[str, Any], run_dir: Path) -> TrialPlan:
        """Return what a trial with these parameters trains; raise SpecError for parameters that cannot be set."""
        hints = typing.get_type_hints(type(self.task))
        names = field_names(type(self.task))
        options = {option.name: option for option in options_of(TrainSpec) if option.is_searchable}
        fields, changes = {name: getattr(self.task, name) for name in names}, dict[str, Any]()
        for name, value in params.items():
            if name in names:
                fields[name] = field_value(name, value, hints[name])
            elif name in options:
                changes[name] = field_value(name, value, options[name].type)
            else:
                raise SpecError(
                    f"search_space() suggests {name!r}, which is neither a field of {type(self.task).__name__} nor an "
                    f"option that can be searched.{nearest(name, [*names, *options])}"
                )
        task = type(self.task)(**fields)
        spec = dataclasses.replace(self.spec, **changes, run_dir=str(run_dir), fresh=False, json=False, quiet=True)
        source = TaskSource.of_file(self.file, task) if self.file is not None else TaskSource.of_value(task)
        return TrialPlan(number, task, spec, source)

    def describe(self) -> dict[str, Any]:
        """Return what must stay the same when the search continues."""
        task = describe_task(self.task)
        fixed = {name: value for name, value in task["fields"].items() if name not in self.space}
        recipe = self.spec.recipe() | {name: getattr(self.spec, name) for name in _COMPARED}
        recipe.pop("threads")  # of each trial: see `divide_cores`
        tune = self.tune
        return {
            "task": {"name": task["name"], "fields": fixed},
            "space": {name: str(dimension) for name, dimension in self.space.items()},
            "metric": tune.metric,
            "constraints": list(tune.constraints),
            "enqueue": [dict(point) for point in tune.points],
            "sampler": tune.sampler,
            "pruner": tune.pruner,
            "seed": self.seed,
            "storage": tune.storage,
            "study": self.study_name,
            "recipe": {name: value for name, value in recipe.items() if name not in self.space},
            **tune.scheduler.describe(self),
        }

    @property
    def num_trials(self) -> int:
        """The trials of the whole search; a grid has no more than its points, also with several trials at once."""
        if self.tune.sampler.partition(":")[0].lower() != "grid":
            return self.tune.trials
        num_points = math.prod(int(dimension.num_values) for dimension in self.space.values())
        return min(self.tune.trials, num_points + len(self.tune.points))

    @property
    def study_name(self) -> str:
        """The name of the study in its storage."""
        return self.tune.study or type(self.task).__name__


def read_points(words: Sequence[str], space: Mapping[str, Dimension], hints: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters that texts such as `lr=1e-3 hidden=64` name, each the first values of a trial."""
    points = []
    for text in words:
        point = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or name not in space:
                raise SpecError(f"enqueue={text!r}: {word!r} sets nothing that is searched ({', '.join(space)}).")
            parsed = field_value(name, value, hints[name])
            point[name] = parsed if isinstance(parsed, bool | int | float | str | None) else value
        points.append(point)
    return points
