"""Sums and sums of squares are exact: the rounded quotients of rational numbers, in any grouping."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from instep.core.errors import DataError
from instep.data.statistics.column_sums import ColumnSums
from instep.data.statistics.limbs import Limbs
from nasty import NASTY


def sums_of(rows: Any) -> ColumnSums:
    sums = ColumnSums()
    sums.add(np.asarray(rows))
    return sums


def true_moments(column: Any) -> tuple[float, float]:
    numbers = [Fraction(float(value)) for value in column if value == value]
    if not numbers:
        return float("nan"), float("nan")
    mean = sum(numbers, Fraction()) / len(numbers)
    variance = sum(((number - mean) ** 2 for number in numbers), Fraction()) / len(numbers)
    return float(mean), _rounded(variance)


def _rounded(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


@pytest.mark.parametrize("name", NASTY)
def test_moments_are_rounded_once(name: str) -> None:
    data = NASTY[name]
    moments = sums_of(data).moments()
    for column in range(min(3, data.shape[1])):
        expected = true_moments(data[:, column])
        np.testing.assert_array_equal([moments.mean[column], moments.variance[column]], expected)


FINITE = st.floats(allow_nan=True, allow_infinity=False, width=64)


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 3)), elements=FINITE))
def test_moments_of_any_doubles(data: Any) -> None:
    moments = sums_of(data).moments()
    for column in range(data.shape[1]):
        np.testing.assert_array_equal(
            [moments.mean[column], moments.variance[column]], true_moments(data[:, column]), str(data)
        )


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(np.float64, st.tuples(st.integers(1, 20), st.integers(1, 3)), elements=FINITE),
    st.lists(st.integers(0, 20), max_size=4),
    st.randoms(),
)
def test_any_grouping_gives_the_same_bits(data: Any, cuts: list[int], random: Any) -> None:
    whole = sums_of(data)
    parts = np.split(data, sorted(min(cut, len(data)) for cut in cuts))
    random.shuffle(parts)
    merged = ColumnSums()
    for number, part in enumerate(parts):
        if number % 2:
            merged.add(part)
        else:
            merged.merge(json.loads(json.dumps(sums_of(part).to_json())))
    assert json.dumps(merged.to_json()) == json.dumps(whole.to_json())
    np.testing.assert_array_equal(merged.moments().variance, whole.moments().variance)


@pytest.mark.parametrize("name", NASTY)
def test_blocks_do_not_matter(name: str) -> None:
    data = NASTY[name]
    merged = ColumnSums()
    for start in range(0, len(data), 611):
        merged.add(data[start : start + 611])
    assert json.dumps(merged.to_json()) == json.dumps(sums_of(data).to_json())
    assert json.dumps(sums_of(data[::-1]).to_json()) == json.dumps(sums_of(data).to_json())
    assert json.dumps(sums_of(np.asfortranarray(data)).to_json()) == json.dumps(sums_of(data).to_json())


def test_digits_never_overflow() -> None:
    limbs = Limbs(2)
    largest = np.array([2**62, -(2**62)])
    limbs._num_adds = (1 << 20) - 3  # carried when this many were added
    for _ in range(5):
        limbs.add(3, largest)
    exponent, totals = limbs.integers()
    assert [total << exponent for total in totals] == [5 * 2**62 << 66, -5 * 2**62 << 66]


@given(st.lists(st.integers(-(2**400), 2**400), min_size=1, max_size=4), st.integers(-60, 60))
def test_integers_survive_the_way_through_json(totals: list[int], power: int) -> None:
    limbs = Limbs(len(totals))
    limbs.add_integers(22 * power, totals)
    limbs.add_integers(22 * power, totals)
    exponent, twice = limbs.integers()
    assert [Fraction(total) * Fraction(2) ** exponent for total in twice] == [
        2 * Fraction(total) * Fraction(2) ** (22 * power) for total in totals
    ]


def test_what_cannot_be_added() -> None:
    sums = sums_of([[1.0, 2.0]])
    with pytest.raises(DataError, match="has 3 columns, and there were 2 before"):
        sums.add(np.zeros((1, 3)))
    with pytest.raises(DataError, match="Column 1 of the data has an infinity"):
        sums.add(np.array([[1.0, -np.inf]]))
