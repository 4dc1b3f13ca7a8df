"""A curve of very many points in few: the mean of each stretch, with its least and its greatest value. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep.monitor.charts.axis import is_drawn

MAX_POINTS = 200


@dataclass(frozen=True)
class Point:
    """One value, or a stretch of values: where it ends, the mean, the least and the greatest."""

    x: float
    y: float | None
    """None: there was no finite value."""
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """A named curve, ready to be drawn."""

    name: str
    points: tuple[Point, ...]
    num_values: int
    """That the points stand for."""

    @property
    def last(self) -> float | None:
        """The last point's value."""
        return self.points[-1].y if self.points else None


def make_curve(name: str, xs: Sequence[float], ys: Sequence[float], max_points: int = MAX_POINTS) -> Curve:
    """Return the curve through the given points, of at most `max_points` points.

    Each point stands for as many values as the others, but for one; what is not finite is left out of its mean.
    """
    count = len(xs)
    if count <= max_points:
        return Curve(name, tuple(_point(xs[i], ys[i : i + 1]) for i in range(count)), count)
    edges = [round(number * count / max_points) for number in range(max_points + 1)]
    return Curve(name, tuple(_point(xs[end - 1], ys[begin:end]) for begin, end in itertools.pairwise(edges)), count)


def _point(x: float, ys: Sequence[float]) -> Point:
    total = sum(ys)
    if not is_drawn(total):  # then one of them may not be
        ys = [y for y in ys if is_drawn(y)]
        if not ys:
            return Point(x, None, None, None)
        total = math.fsum(y / len(ys) for y in ys) * len(ys)
    low, high = float(min(ys)), float(max(ys))
    return Point(x, min(high, max(low, total / len(ys))), low, high)
