"""The steps of a run as columns, and the curves that are drawn of them."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from instep.monitor.charts.curve import Curve, make_curve

_WARM_UP = 5
"""Steps of each attempt that do not count for the speed: caches are cold, kernels are compiled."""
_SHORTEST_S = 1e-9
_STEPS_OF_A_SPEED, _MAX_SPEEDS = 10, 60
"""A point of the curve of the speed has at least this many steps, and the curve at most this many points."""
MAX_NAMES = 40
"""Scalars and metrics that are kept; a run that logs more has too many to look at."""


class Column:
    """Values by step."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")

    def add(self, step: float, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)


class StepTable:
    """Takes rank 0's events in; has the columns of everything that was logged by step."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {"loss": Column(), "lr": Column(), "grad_norm": Column()}
        self.left_out: set[str] = set()
        """Names beyond the limit."""
        self.num_not_finite, self.num_skipped = 0, 0
        self.first_not_finite: Mapping[str, Any] | None = None
        self.last: Mapping[str, Any] = {}
        self._times = array("d")
        self._durations, self._samples, self._ends = array("d"), array("d"), array("d")
        self._before: float | None = None
        self._paused_s = 0.0
        self._num_in_attempt = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event in."""
        kind = event["event"]
        if kind == "step":
            self._take_step(event)
        elif kind == "eval":
            for name, value in event["metrics"].items():
                self._add(f"metric/{name}", event["step"], value)
            self._paused_s += event["seconds"]
        elif kind == "save":
            self._paused_s += _number(event.get("stall_s"))
        elif kind == "start":
            self._before, self._num_in_attempt = None, 0

    def step_at(self, time_s: float) -> int:
        """Return the last step that had ended at a moment; 0: none."""
        place = bisect_right(self._times, time_s)
        return int(self.columns["loss"].steps[place - 1]) if place else 0

    def curve(self, name: str, max_points: int) -> Curve:
        """Return the curve of a column."""
        column = self.columns[name]
        return make_curve(name, column.steps, column.values, max_points)

    def speed_curve(self, max_points: int) -> Curve:
        """Return samples per second over the steps: of each stretch of steps, their samples over their time."""
        count = len(self._ends)
        num_points = min(max_points, _MAX_SPEEDS, max(1, count // _STEPS_OF_A_SPEED)) if count else 0
        edges = [round(number * count / num_points) for number in range(num_points + 1)] if num_points else []
        rates = Column()
        for begin, end in itertools.pairwise(edges):
            rates.add(self._ends[end - 1], sum(self._samples[begin:end]) / sum(self._durations[begin:end]))
        return make_curve("samples/s", rates.steps, rates.values, max_points)

    def samples_per_s(self) -> float | None:
        """Return the mean speed of the steps; None: there were too few."""
        total_s = sum(self._durations)
        return sum(self._samples) / total_s if total_s > 0 else None

    def _take_step(self, event: Mapping[str, Any]) -> None:
        step, loss = event["step"], event["loss"]
        self.last = event
        if loss - loss != 0:
            self.num_not_finite += 1
            self.first_not_finite = self.first_not_finite or event
        self._times.append(event["time"])
        self.columns["loss"].add(step, loss)
        self.columns["lr"].add(step, event["lr"])
        if len(event) > 7:  # the usual step has no more than these
            self._take_more(event, step)
        now, self._num_in_attempt = event["time"], self._num_in_attempt + 1
        if self._before is not None and self._num_in_attempt > _WARM_UP:
            self._durations.append(max(now - self._before - self._paused_s, _SHORTEST_S))
            self._samples.append(event["num_samples"])
            self._ends.append(step)
        self._before, self._paused_s = now, 0.0

    def _take_more(self, event: Mapping[str, Any], step: int) -> None:
        self.num_skipped += event.get("skipped") is True
        norm, scalars = event.get("grad_norm"), event.get("scalars")
        if isinstance(norm, int | float):
            self.columns["grad_norm"].add(step, norm)
        if isinstance(scalars, dict):
            for name, value in scalars.items():
                self._add(f"scalar/{name}", step, value)

    def _add(self, name: str, step: int, value: Any) -> None:
        if not isinstance(value, int | float):
            return
        if name not in self.columns:
            if len(self.columns) >= MAX_NAMES:
                self.left_out.add(name)
                return
            self.columns[name] = Column()
        self.columns[name].add(step, value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
