"""Means of a few measurements, with intervals. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5 % quantiles of Student's t distribution for 1, 2, … degrees of freedom."""
_T_95_NORMAL = 1.96


@dataclass(frozen=True)
class Estimate:
    """A mean, and its 95 % interval by Student's t; None: one measurement has none."""

    mean: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of positive measurements that do not depend on each other, with its interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None)
    freedom = len(values) - 1
    quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else _T_95_NORMAL
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(mean - half, 0.0), mean + half)
