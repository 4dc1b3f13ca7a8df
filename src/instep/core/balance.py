"""Cut a chain of layers into stages of about the same cost. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence


def balance(costs: Sequence[float], count: int) -> list[int]:
    """Cut a chain into `count` runs whose dearest one costs as little as it can; give the bounds, from 0 to the end.

    Of the ways that are equally good, the one whose runs differ least is taken. No run is empty.
    """
    assert 1 <= count <= len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    most = _least_most(sums, count)

    def square(first: int, last: int) -> float:
        cost = sums[last] - sums[first]
        return cost * cost if cost <= most else math.inf

    return _best(sums, count, square, max_only=False)


def _least_most(sums: Sequence[float], count: int) -> float:
    """Find the least that the dearest of `count` runs can cost, a little rounded up."""
    bounds = _best(sums, count, lambda first, last: sums[last] - sums[first], max_only=True)
    most = max(sums[b] - sums[a] for a, b in itertools.pairwise(bounds))
    return most + 1e-9 * abs(sums[-1])  # differences of sums round; equal costs must stay equal


def _best(sums: Sequence[float], count: int, worth: Callable[[int, int], float], *, max_only: bool) -> list[int]:
    """Find the bounds whose runs' worths have the smallest maximum, or the smallest sum."""
    size = len(sums) - 1
    best = [0.0, *[math.inf] * size]
    back: list[list[int]] = []
    for run in range(1, count + 1):
        found, origin = [math.inf] * (size + 1), [run - 1] * (size + 1)
        for last in range(run, size - (count - run) + 1):
            for first in range(run - 1, last):
                own = worth(first, last)
                total = max(best[first], own) if max_only else best[first] + own
                if total < found[last]:
                    found[last], origin[last] = total, first
        best = found
        back.append(origin)
    bounds = [size]
    for origin in reversed(back):
        bounds.append(origin[bounds[-1]])
    return bounds[::-1]
