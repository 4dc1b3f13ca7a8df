"""What a search looks for: metrics to minimize or maximize, and limits to keep. Pure.

A metric is one of the Task's evaluation (`accuracy`, `eval_loss`), or a number that every training has (MEASURES).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from instep.core.errors import SpecError
from instep.core.metric_goal import MetricGoal

MEASURES = ("loss", "memory_bytes", "num_parameters", "wall_s")
"""Of every training: the last training loss, the peak of rank 0's memory (on the accelerator, if there is one), the
model's parameters, the time that it took."""
OUT_OF_MEMORY = "out_of_memory"
"""The constraint that a trial violates when memory runs out."""


def read_goals(text: str) -> tuple[MetricGoal, ...]:
    """Return the goals that `accuracy:max,wall_s:min` names."""
    goals = []
    for part in text.split(","):
        if not re.fullmatch(r"[^:]+:(min|max)", part):
            name = part.partition(":")[0] or "accuracy"
            raise SpecError(
                f"metric={part!r} does not say whether more or less is better. Write {name}:max or {name}:min."
            )
        goal = MetricGoal.parse("metric", part)
        assert goal is not None
        goals.append(goal)
    names = [goal.name for goal in goals]
    if len(set(names)) < len(names):
        raise SpecError(f"metric={text!r} names a metric twice.")
    return tuple(goals)


class Constraint(NamedTuple):
    """A limit that a trial has to keep: `memory_bytes<=2e9`."""

    name: str
    limit: float
    is_upper: bool

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Return the constraint that a text states."""
        match = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=)\s*(\S+)\s*", text)
        try:
            limit = float(match[3]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not math.isfinite(limit):
            raise SpecError(f"constraint={text!r} is not a limit. Write for instance memory_bytes<=2e9 or wall_s<=60.")
        return cls(match[1], limit, match[2] == "<=")

    def violation(self, measured: Mapping[str, float]) -> float:
        """Return by how much the limit is exceeded, as Optuna counts: more than 0 is infeasible."""
        value = measured[self.name]
        return value - self.limit if self.is_upper else self.limit - value

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.is_upper else '>='}{self.limit:g}"


def check_names(goals: tuple[MetricGoal, ...], constraints: tuple[Constraint, ...], known: Mapping[str, Any]) -> None:
    """Raise SpecError if an evaluation does not have a metric that the search needs."""
    for option, name in [("metric", g.name) for g in goals] + [("constraint", c.name) for c in constraints]:
        if name not in known and name not in MEASURES:
            reported = ", ".join(known) or "none: it has no evaluation"
            raise SpecError(
                f"{option}={name} is never reported. Metrics of this Task: {reported}; of every training: "
                f"{', '.join(MEASURES)}. Start over with one of them, and --fresh."
            )
