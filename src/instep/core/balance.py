"""Split a chain of layers into stages of about the same cost. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence


def balance(costs: Sequence[float], count: int) -> list[int]:
    """Split a chain into `count` runs with the smallest possible maximal cost; return the bounds, from 0 to the end.

    Of equally good splits, return the one whose runs differ least. No run is empty.
    """
    assert 1 <= count <= len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    most = _least_most(sums, count)

    def square(first: int, last: int) -> float:
        cost = sums[last] - sums[first]
        return cost * cost if cost <= most else math.inf

    return _best(sums, count, square, max_only=False)


def _least_most(sums: Sequence[float], count: int) -> float:
    """Return the smallest possible cost of the most expensive of `count` runs, slightly rounded up."""
    bounds = _best(sums, count, lambda first, last: sums[last] - sums[first], max_only=True)
    most = max(sums[b] - sums[a] for a, b in itertools.pairwise(bounds))
    return most + 1e-9 * abs(sums[-1])  # differences of sums round; equal costs must stay equal


def _best(sums: Sequence[float], count: int, worth: Callable[[int, int], float], *, max_only: bool) -> list[int]:
    """Return the bounds for which the maximum, or the sum, of the runs' worths is smallest."""
    size = len(sums) - 1
    best = [0.0, *[math.inf] * size]
    back: list[list[int]] = []
    for run in range(1, count + 1):
        totals, origin = [math.inf] * (size + 1), [run - 1] * (size + 1)
        for last in range(run, size - (count - run) + 1):
            for first in range(run - 1, last):
                own = worth(first, last)
                total = max(best[first], own) if max_only else best[first] + own
                if total < totals[last]:
                    totals[last], origin[last] = total, first
        best = totals
        back.append(origin)
    bounds = [size]
    for origin in reversed(back):
        bounds.append(origin[bounds[-1]])
    return bounds[::-1]
