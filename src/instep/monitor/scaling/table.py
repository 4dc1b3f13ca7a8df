"""Speed-up and efficiency by world size. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedRow:
    """One world size: its speed, how many times that of the smallest one it is, and how much of the ideal."""

    world_size: int
    samples_per_s: float
    speedup: float
    efficiency: float
    """The speed-up over the growth of the world size: 1 is ideal."""


def speed_rows(speeds: Iterable[tuple[int, float]]) -> list[SpeedRow]:
    """Return a row for each world size, from (world size, samples per second); of several with one size, the mean.

    All are compared with the smallest world size.
    """
    by_size: dict[int, list[float]] = {}
    for world_size, speed in speeds:
        by_size.setdefault(world_size, []).append(speed)
    means = {size: statistics.fmean(by_size[size]) for size in sorted(by_size)}
    if not means:
        return []
    smallest = min(means)
    ratios = {size: speed / means[smallest] for size, speed in means.items()}
    return [SpeedRow(size, means[size], ratios[size], ratios[size] * smallest / size) for size in means]
