"""Sums that no grouping changes."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instep.core.exact_sum import ExactSum

FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40)


def sum_of(values: list[float]) -> ExactSum:
    total = ExactSum()
    total.add(np.array(values))
    return total


@given(FLOATS, st.integers(1, 5), st.randoms())
def test_grouping_and_order_do_not_matter(values: list[float], num_groups: int, random: object) -> None:
    ones = sum_of([1.0] * len(values))
    expected = sum(map(Fraction, values)) / len(values)
    shuffled = values[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    total = ExactSum()
    for group in range(num_groups):
        total.merge(json.loads(json.dumps(sum_of(shuffled[group::num_groups]).to_json())))
    assert total.over(ones) == float(expected)


def test_where_float_sums_fail() -> None:
    values = [1e16, 1.0, -1e16, 1e-300, 5e-324, -1e-300]
    assert sum_of(values).over(sum_of([1.0])) == 1.0
    assert sum_of([5e-324] * 3).over(sum_of([1.0])) == 1.5e-323


def test_counts_are_exact() -> None:
    assert sum_of([1.0] * 7 + [0.0] * 3).over(sum_of([1.0] * 10)) == 0.7


def test_what_is_not_finite_stays_so() -> None:
    ones = sum_of([1.0])
    assert math.isnan(sum_of([1.0, math.nan]).over(ones))
    assert sum_of([1.0, math.inf]).over(ones) == math.inf
    assert math.isnan(sum_of([math.inf, -math.inf]).over(ones))
    assert math.isnan(sum_of([1.0]).over(sum_of([0.0])))
