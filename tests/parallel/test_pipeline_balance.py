"""A chain is cut so that its dearest run costs as little as it can: compared with every possible cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.parallel.pipeline.profile import balance


def most(costs: list[float], bounds: tuple[int, ...] | list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    bounds = balance(costs, count)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), count + 1)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    every = ([0, *inner, len(costs)] for inner in itertools.combinations(range(1, len(costs)), count - 1))
    assert most(costs, bounds) == pytest.approx(min(most(costs, each) for each in every))


def test_costs_decide_and_not_counts() -> None:
    assert balance([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2) == [0, 1, 10]
    assert balance([1, 1, 1, 9], 2) == [0, 3, 4]


def test_of_equally_good_ways_the_most_even_one() -> None:
    assert balance([4, 1, 1, 1, 1], 3) == [0, 1, 3, 5]
    assert balance([0.1] * 6, 3) == [0, 2, 4, 6]


def test_a_long_chain() -> None:
    bounds = balance([1.0] * 300, 7)
    assert max(b - a for a, b in itertools.pairwise(bounds)) == 43
