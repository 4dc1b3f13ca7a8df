"""A model of efficiency, fitted to a few world sizes. Pure.

[Note: The model of efficiency]
Gunther's universal scalability law: with k times the processes, 1 / efficiency = 1 + sigma·(k − 1) + kappa·k·(k − 1).
sigma is the share of a step that more processes do not make shorter (Amdahl's law, if kappa is 0), kappa what every
pair of processes costs the others. Both are fitted by least squares and are not negative. Two world sizes determine
one number only, so that kappa is then 0, which is a guess in favour of large world sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REACH = 4
"""The model is not asked about world sizes that are more than so many times the largest measured one."""
_RESAMPLES = 400
_NEGLIGIBLE = 1e-30
"""No number of processes that exists is slowed down by less."""


@dataclass(frozen=True)
class EfficiencyModel:
    """The fitted law; k is the world size over the smallest one."""

    sigma: float
    kappa: float

    def efficiency(self, k: float) -> float:
        """Return the efficiency with k times the processes."""
        return 1 / (1 + self.sigma * (k - 1) + self.kappa * k * (k - 1))

    def reaches(self, least: float) -> float:
        """Return up to which k the efficiency is at least `least`; infinity: it always is."""
        most = 1 / least - 1
        if self.kappa < _NEGLIGIBLE:
            return 1 + most / self.sigma if self.sigma > _NEGLIGIBLE else math.inf
        # kappa k² + (sigma − kappa) k − (sigma + most) = 0, in the form that does not cancel
        half = (self.sigma - self.kappa) / 2
        root = math.sqrt(half * half + self.kappa * (self.sigma + most))
        return (self.sigma + most) / (half + root) if half > 0 else (root - half) / self.kappa


def fit(efficiencies: Mapping[float, float]) -> EfficiencyModel:
    """Return the law that is nearest to efficiencies by k; those at k = 1 are 1 by definition."""
    points = [(k - 1, k * (k - 1), 1 / e - 1) for k, e in efficiencies.items() if k > 1 and e > 0]
    if not points:
        return EfficiencyModel(0.0, 0.0)
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    alone = EfficiencyModel(max(0.0, ay / aa), 0.0)
    determinant = aa * bb - ab * ab
    if len(points) < 2 or determinant <= 1e-12 * aa * bb:
        return alone
    sigma, kappa = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    if kappa < 0:
        return alone
    return EfficiencyModel(sigma, kappa) if sigma >= 0 else EfficiencyModel(0.0, max(0.0, by / bb))


@dataclass(frozen=True)
class Limit:
    """Up to where efficiency is at least `least`."""

    least: float
    world_size: int | None
    """The smallest world size whose efficiency is lower, by the model; None: beyond what may be said."""
    low: int | None
    """With `high`, where it lies in 95 % of the rounds drawn anew; None: beyond."""
    high: int | None
    is_measured: bool
    """Whether it is within the world sizes that were measured."""
    reach: int
    """The largest world size of which anything is said."""


def limit(rounds: Sequence[Mapping[int, float]], least: float = 0.8) -> Limit:
    """Return where efficiency falls below `least`; each round has the efficiency of every world size."""
    sizes = sorted(rounds[0])
    reach = REACH * sizes[-1]

    def crossing(drawn: Sequence[Mapping[int, float]]) -> int | None:
        means = {size / sizes[0]: sum(r[size] for r in drawn) / len(drawn) for size in sizes}
        k = fit(means).reaches(least)
        world_size = math.floor(sizes[0] * k * (1 + 1e-9)) + 1 if k < reach else reach + 1
        return world_size if world_size <= reach else None

    limit = crossing(rounds)
    generator = random.Random(0)
    drawn = sorted(
        (crossing([generator.choice(rounds) for _ in rounds]) or reach + 1 for _ in range(_RESAMPLES)),
    )
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES) - 1]
    return Limit(
        least=least,
        world_size=limit,
        low=low if low <= reach and len(rounds) > 1 else None,
        high=high if high <= reach and len(rounds) > 1 else None,
        is_measured=limit is not None and limit <= sizes[-1],
        reach=reach,
    )
