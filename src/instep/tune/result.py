"""The outcome of a search: its trials, the best of them, and the command that trains that one again. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from instep.core.metric_goal import MetricGoal
from instep.core.options import OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.train.task import Task, fields_of
from instep.tune.space import text_of

if TYPE_CHECKING:  # a package that only a search needs
    from optuna.trial import FrozenTrial

State = Literal["running", "paused", "complete", "infeasible", "pruned", "failed"]
GOING_ON = ("running", "paused")
"""States of trials that have not ended."""
Status = Literal["complete", "preempted", "out-of-time", "running"]
"""running: other processes that share the search still train trials, and nothing is left for this one."""
COPIED = "copied_from"
"""The attribute of a trial that continues another one; see `TrialRecord.copied_from`."""
_STATES: dict[str, State] = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class TrialRecord:
    """One trial: what it tried, and how that ended."""

    number: int
    state: State
    params: dict[str, Any]
    values: tuple[float, ...]
    """Of the metrics; of a trial that is running or was pruned, the newest evaluation's. Empty: there is none."""
    num_evaluations: int
    sentence: str
    """Why it failed, was pruned or is infeasible."""
    wall_s: float | None
    run_dir: str
    copied_from: dict[str, int] | None = None
    """Of a trial that continues another one (`--pruner pbt`): that `trial`, after so many of its evaluations."""

    @classmethod
    def of(cls, trial: FrozenTrial, run_dir: Path) -> TrialRecord:
        """Return the record of a trial of the study."""
        is_infeasible = any(violation > 0 for violation in trial.constraints.values())
        values = tuple(trial.values or ())
        if not values and trial.intermediate_values:
            values = (trial.intermediate_values[max(trial.intermediate_values)],)
        return cls(
            number=trial.number,
            state="infeasible" if is_infeasible else _STATES[trial.state.name],
            params=dict(trial.params),
            values=values,
            num_evaluations=len(trial.intermediate_values),
            sentence=trial.user_attrs.get("sentence", ""),
            wall_s=trial.user_attrs.get("wall_s"),
            run_dir=str(run_dir),
            copied_from=trial.user_attrs.get(COPIED),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; with one metric, its value as `value`."""
        data = dataclasses.asdict(self)
        return data | {"value": self.values[0] if len(self.values) == 1 else None, "values": list(self.values)}


@dataclass(frozen=True)
class TuneResult:
    """How a search ended."""

    goals: tuple[MetricGoal, ...]
    trials: tuple[TrialRecord, ...]
    """By number."""
    status: Status
    run_dir: str
    """The folder of the search."""
    command: str = ""
    """Trains the best trial again; empty while the search runs, or for a Task that is in no file."""
    at_once: int = 1
    """How many trials may run at the same time."""
    speedup: float | None = None
    """How many times as many samples a second trials at once compute as one alone; None: it is not known."""

    @property
    def best(self) -> TrialRecord | None:
        """The best trial by the first metric; None: none is complete and feasible."""
        return next(iter(self.front), None)

    @property
    def front(self) -> tuple[TrialRecord, ...]:
        """The trials that no other one beats in all metrics, best first; with one metric, those with the best value."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        front = [t for t in complete if not any(_beats(self._worth(o), self._worth(t)) for o in complete)]
        return tuple(sorted(front, key=lambda trial: (-self._worth(trial)[0], trial.number)))

    def ranked(self) -> list[TrialRecord]:
        """Return all trials: complete ones best first, then by how they stand."""
        order = ("complete", "running", "paused", "pruned", "infeasible", "failed")
        return sorted(
            self.trials,
            key=lambda t: (order.index(t.state), -self._worth(t)[0] if t.values else 0.0, t.number),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        best, front = self.best, self.front
        data: dict[str, Any] = {
            "best": None if best is None else _brief(best),
            "trials": [trial.to_json() for trial in self.trials],
            "status": self.status,
            "run_dir": self.run_dir,
            "command": self.command,
            "at_once": self.at_once,
            "speedup": None if self.speedup is None else round(self.speedup, 3),
        }
        return data | ({"front": [_brief(trial) for trial in front]} if len(self.goals) > 1 else {})

    def _worth(self, trial: TrialRecord) -> tuple[float, ...]:
        pairs = zip(self.goals, trial.values, strict=False)
        return tuple(-value if goal.is_lowest_best else value for goal, value in pairs)


def _brief(trial: TrialRecord) -> dict[str, Any]:
    value: Any = trial.values[0] if len(trial.values) == 1 else list(trial.values)
    return {"params": trial.params, "value": value, "run_dir": trial.run_dir}


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one is as good as another in every metric, and better in one."""
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def train_command(file: Path, task: Task, spec: TrainSpec) -> str:
    """Return the command that trains this Task in this way."""
    words = ["instep", "train", f"{file}:{type(task).__name__}"]
    for field in fields_of(type(task)):
        value = getattr(task, field.name)
        if value != field.default:
            words.append(f"{field.name}={text_of(value)}")
    for option in options_of(TrainSpec):
        value = getattr(spec, option.name)
        if value != option.default and option.scope in (OptionScope.RECIPE, OptionScope.OPERATIONAL):
            words += option.words(value)
    return shlex.join(words)
