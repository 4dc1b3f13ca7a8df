"""Which of several measured candidates to use. Pure; candidates are numbers, of which less is cheaper."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from instep.core.interval import Estimate, estimate


@dataclass(frozen=True)
class Choice:
    """What to use, and the fastest; they may differ."""

    chosen: int
    fastest: int
    is_clear: bool
    """Whether the fastest is clearly faster than every other one."""


def speeds(rates: Mapping[int, Sequence[float]]) -> dict[int, Estimate]:
    """Return the mean speed of each candidate with its interval, in ascending order of the candidates."""
    return {key: estimate(rates[key]) for key in sorted(rates)}


def fastest_of(rates: Mapping[int, Sequence[float]]) -> Choice:
    """Return the fastest candidate, or the smallest one that cannot be told from it.

    Each round measures all candidates, so the differences by round decide: what slows a whole round down cancels.
    """
    means = {key: statistics.fmean(rates[key]) for key in sorted(rates)}
    fastest = max(means, key=means.__getitem__)
    alike = [key for key in means if key == fastest or not _is_slower(rates[key], rates[fastest])]
    return Choice(alike[0], fastest, len(alike) == 1)


def _is_slower(rates: Sequence[float], fastest: Sequence[float]) -> bool:
    """Return whether rates are clearly lower than those of the same rounds; of one round nothing is clear."""
    lost = estimate([1 - own / best for own, best in zip(rates, fastest, strict=True)])
    return lost.half_width is not None and lost.mean - lost.half_width > 0


def smallest_within(rates: Mapping[int, Sequence[float]], share: float) -> int:
    """Return the smallest candidate that loses at most this share of the best mean speed."""
    means = {key: statistics.fmean(rates[key]) for key in sorted(rates)}
    return next(key for key in means if means[key] >= (1 - share) * max(means.values()))
