"""Which metric decides, and whether its highest or its lowest value is the best. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from instep.core.errors import SpecError, TaskError


class MetricGoal(NamedTuple):
    """A metric, as options name it: `accuracy`, or `eval_loss:min`."""

    option: str
    name: str
    is_lowest_best: bool = False

    @classmethod
    def parse(cls, option: str, text: str | None) -> MetricGoal | None:
        """Return the goal that an option names; None: it names none."""
        if text is None:
            return None
        if not re.fullmatch(r"[^:]+(:(min|max))?", text):
            raise SpecError(f"{option}={text!r} is not a metric. Write accuracy, or eval_loss:min.")
        name, _, which = text.partition(":")
        return cls(option, name, which == "min")

    def worth(self, metrics: Mapping[str, float]) -> float:
        """Return the metric with a sign, so that more is better; NaN: there is none."""
        value = metrics.get(self.name, math.nan)
        return -value if self.is_lowest_best else value

    def check(self, metrics: Collection[str]) -> None:
        """Raise TaskError if there is no such metric; one that computes a vector is known by its name."""
        if not any(self.name == metric or self.name.startswith(f"{metric}/") for metric in metrics):
            raise TaskError(f"{self.option}={self.name}: there is no such metric. This Task has {', '.join(metrics)}.")
