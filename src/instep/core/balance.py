"""Split a chain of layers into stages of about the same cost. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence


def balance(costs: Sequence[float], count: int) -> list[int]:
    """Split a chain into `count` runs with the smallest possible maximal cost; return the bounds, from 0 to the end.

    Of equally good splits, return the one whose runs differ least. No run is empty.
    """
    assert 1 <= count <= len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(first: int, last: int) -> float:
        return sums[last] - sums[first]

    least = max(itertools.starmap(cost, itertools.pairwise(_best(len(costs), count, cost, max))))
    most = least + 1e-9 * abs(sums[-1])  # differences of sums round; equal costs must stay equal

    def square(first: int, last: int) -> float:
        own = cost(first, last)
        return own * own if own <= most else math.inf

    return _best(len(costs), count, square, operator.add)


def _best(
    size: int, count: int, worth: Callable[[int, int], float], combine: Callable[[float, float], float]
) -> list[int]:
    """Return the bounds for which the runs' worths, combined (the maximum or the sum), are smallest."""
    best = [0.0, *[math.inf] * size]
    back: list[list[int]] = []
    for run in range(1, count + 1):
        totals, origin = [math.inf] * (size + 1), [run - 1] * (size + 1)
        for last in range(run, size - (count - run) + 1):
            for first in range(run - 1, last):
                total = combine(best[first], worth(first, last))
                if total < totals[last]:
                    totals[last], origin[last] = total, first
        best = totals
        back.append(origin)
    bounds = [size]
    for origin in reversed(back):
        bounds.append(origin[bounds[-1]])
    return bounds[::-1]
