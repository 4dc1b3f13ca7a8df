"""When to save, and which checkpoints to keep. Pure.

A save costs training time; a failure costs the time since the last save, half an interval on average. The sum is least
where the interval is the square root of twice the product of the cost and the time between failures (Young 1974,
refined by Daly 2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from instep.checkpoint.manifest import newest_first, step_of
from instep.core.metric_goal import MetricGoal

FIRST_SAVE_S = 30.0
"""When to make the first save, from which the cost is measured."""
_SHORTEST_S, _LONGEST_S = 5.0, 3600.0
Scores = Mapping[str, Mapping[str, float]]
"""The evaluations of those checkpoints that have one, by checkpoint name and metric."""


def best_interval(stall_s: float, write_s: float, between_failures_s: float) -> float:
    """Return the seconds between two saves that block training for `stall_s` and take `write_s` in all."""
    wanted = math.sqrt(2 * stall_s * between_failures_s)
    return min(max(wanted, 2 * write_s, _SHORTEST_S), _LONGEST_S)  # the disk must not be busy half of the time


class RetentionPolicy(NamedTuple):
    """Which checkpoints of a run to keep."""

    newest: int = 3
    every: int | None = None
    """Also keep those whose step is a multiple of this."""
    best_by: MetricGoal | None = None
    """Also keep the best by this metric."""
    trusted: int | None = None
    """Also keep the newest whose step is at most this: where to resume if later ones turn out to be wrong."""

    @classmethod
    def from_options(cls, newest: int, every: int | None, best: str | None) -> RetentionPolicy:
        """Parse the options of the spec; `best` is a metric, followed by `:min` if less is better."""
        return cls(newest, every, MetricGoal.parse("keep_best", best))

    def worth(self, metrics: Mapping[str, float]) -> float:
        """Return the metric that decides which checkpoint is the best, so that more is better; NaN: there is none."""
        return math.nan if self.best_by is None else self.best_by.worth(metrics)

    def best_of(self, scores: Scores) -> str | None:
        """Return the name of the best checkpoint; of equal ones the newest."""
        known = {name: worth for name in scores if not math.isnan(worth := self.worth(scores[name]))}
        return max(known, key=lambda name: (known[name], step_of(name) or 0), default=None)

    def to_prune(self, names: Sequence[str], scores: Scores) -> list[str]:
        """Return the names of the checkpoints to delete."""
        ordered = newest_first(names)
        trusted = [name for name in ordered if self.trusted is not None and (step_of(name) or 0) <= self.trusted]
        staying = {*trusted[:1], self.best_of(scores)}
        return [
            name
            for name in ordered[self.newest :]
            if name not in staying and (self.every is None or (step_of(name) or 0) % self.every)
        ]
