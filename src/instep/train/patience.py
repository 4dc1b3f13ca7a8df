"""Early stopping: end a run whose metric has not improved for a number of evaluations.

Ranks: all, alike; a metric is the same number on all of them. Its state is a part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from instep.core.metric_goal import MetricGoal
from instep.core.plural import plural
from instep.core.spec import TrainSpec


class Patience:
    """Counts evaluations since the metric was the best so far."""

    def __init__(self, goal: MetricGoal, patience: int) -> None:
        self.goal = goal
        self._patience = patience
        self._best = -math.inf
        self._num_since = 0

    @classmethod
    def of(cls, spec: TrainSpec) -> Patience | None:
        """Return what a spec asks for; None: nothing."""
        goal = MetricGoal.parse("stop_when", spec.stop_when)
        return None if goal is None else cls(goal, spec.patience)

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        return self._num_since >= self._patience

    def take(self, metrics: Mapping[str, float]) -> None:
        """Count an evaluation."""
        self.goal.check(metrics)
        worth = self.goal.worth(metrics)
        is_better = worth > self._best  # NaN is not
        self._best, self._num_since = (worth, 0) if is_better else (self._best, self._num_since + 1)

    def describe(self) -> str:
        """Return why to stop."""
        best = -self._best if self.goal.is_lowest_best else self._best
        since = plural(self._num_since, "evaluation")
        return f"{self.goal.name} has not been better than {best:.6g} for {since} (--stop-when, --patience)"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"metric": self.goal.name, "best": self._best, "num_since": self._num_since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint holds; a run that goes on with another metric begins to count."""
        if state["metric"] == self.goal.name:
            self._best, self._num_since = float(state["best"]), int(state["num_since"])
