"""What a report draws and says of the steps: curves, and the speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from instep.monitor.charts.curve import Curve, make_curve
from instep.monitor.report.step_columns import Floats, StepColumns

_WARM_UP = 5
"""Steps of each attempt that do not count for the speed: caches are cold, kernels are compiled."""
_SHORTEST_S = 1e-9
_STEPS_OF_A_SPEED, _MAX_SPEEDS = 10, 60
"""A point of the curve of the speed has at least this many steps, and the curve at most this many points."""
MAX_NAMES = 40
"""Scalars and metrics that are kept; a run that logs more has too many to look at."""


class StepTable:
    """The steps of a run, and rank 0's other events, which say what the time between steps was spent on."""

    def __init__(self, steps: StepColumns, events: Iterable[Mapping[str, Any]]) -> None:
        self.steps = steps
        self._metrics: dict[str, tuple[list[float], list[float]]] = {}
        starts, pauses = [], []
        for event in events:
            kind = event["event"]
            if kind == "start":
                starts.append(event["time"])
            elif kind == "save":
                pauses.append((event["time"], _number(event.get("stall_s"))))
            elif kind == "eval":
                pauses.append((event["time"], _number(event["seconds"])))
                for name, value in event["metrics"].items():
                    self._add(f"metric/{name}", event["step"], value)
        for index, scalars in steps.scalars.items():
            for name, value in scalars.items():
                self._add(f"scalar/{name}", steps.step[index], value)
        self._durations, self._counted = _durations(steps.time, starts, pauses)

    def last(self) -> dict[str, Any]:
        """Return the last step's step, epoch and loss; nothing if there is none."""
        if not len(self.steps):
            return {}
        return {
            "step": int(self.steps.step[-1]),
            "epoch": int(self.steps.epoch[-1]),
            "loss": float(self.steps.loss[-1]),
        }

    def step_at(self, time_s: float) -> int:
        """Return the last step that had ended at a moment; 0: none."""
        place = int(np.searchsorted(self.steps.time, time_s, side="right"))
        return int(self.steps.step[place - 1]) if place else 0

    def not_finite(self) -> list[int]:
        """Return the indices of the steps whose loss was not finite."""
        return [int(index) for index in np.flatnonzero(~np.isfinite(self.steps.loss))]

    def curves(self, max_points: int) -> dict[str, Curve]:
        """Return the curve of everything that was logged."""
        steps = self.steps
        has_norm = np.isfinite(steps.grad_norm)
        columns: dict[str, tuple[Sequence[float], Sequence[float]]] = {
            "loss": (steps.step.tolist(), steps.loss.tolist()),
            "lr": (steps.step.tolist(), steps.lr.tolist()),
            "grad_norm": (steps.step[has_norm].tolist(), steps.grad_norm[has_norm].tolist()),
            **self._metrics,
        }
        curves = {name: make_curve(name, xs, ys, max_points) for name, (xs, ys) in columns.items() if xs}
        speeds = {"samples/s": steps.num_samples, "tokens/s": steps.num_tokens}
        for name, counts in speeds.items():
            curves[name] = self._speed_curve(name, counts[self._counted], max_points)
        return {name: curve for name, curve in curves.items() if curve.points}

    def samples_per_s(self) -> float | None:
        """Return the mean speed of the steps; None: there were too few."""
        return self._speed_of(self.steps.num_samples)

    def tokens_per_s(self) -> float | None:
        """Return the mean speed in tokens; None: there were too few steps, or their tokens are not counted."""
        return self._speed_of(self.steps.num_tokens)

    def _speed_of(self, counts: Floats) -> float | None:
        total_s, total = float(self._durations.sum()), float(counts[self._counted].sum())
        return total / total_s if total_s > 0 and math.isfinite(total) else None

    def _speed_curve(self, name: str, counts: Floats, max_points: int) -> Curve:
        """Return the speed over the steps: of each stretch of steps, what `counts` has of them over their time."""
        count = len(self._durations) if np.isfinite(counts).all() else 0
        ends = self.steps.step[self._counted]
        num_points = min(max_points, _MAX_SPEEDS, count // _STEPS_OF_A_SPEED)
        edges = [round(number * count / num_points) for number in range(num_points + 1)] if num_points else []
        stretches = list(itertools.pairwise(edges))
        rates = [float(counts[a:b].sum() / self._durations[a:b].sum()) for a, b in stretches]
        return make_curve(name, [float(ends[b - 1]) for _, b in stretches], rates, max_points)

    def _add(self, name: str, step: float, value: Any) -> None:
        if not isinstance(value, int | float) or (name not in self._metrics and len(self._metrics) >= MAX_NAMES):
            return
        steps, values = self._metrics.setdefault(name, ([], []))
        steps.append(float(step))
        values.append(float(value))


def _durations(
    times: Floats, starts: Sequence[float], pauses: Sequence[tuple[float, float]]
) -> tuple[Floats, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return how long steps took, without pauses, and which steps these are: not the first ones after a start."""
    counted = np.zeros(len(times), dtype=bool)
    if len(times) < 2:
        return np.empty(0), counted
    counted[_WARM_UP:] = True
    took = np.diff(times, prepend=times[0])
    for start in starts:
        first = int(np.searchsorted(times, start))
        counted[first : first + _WARM_UP] = False
    for ended, seconds in pauses:
        after = int(np.searchsorted(times, ended, side="right"))
        if after < len(took):
            took[after] -= seconds
    return np.maximum(took[counted], _SHORTEST_S), counted


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
