"""Sets of times, against sets of points."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from instep.profile.intervals import difference, intersection, length, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def points(spans: list[tuple[float, float]]) -> set[int]:
    """Return the unit steps that integer intervals cover."""
    return {point for begin, end in spans for point in range(int(begin), int(end))}


@given(SPANS, SPANS)
def test_sets(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    a, b = union(left), union(right)
    assert points(a) == points(left)
    assert a == sorted(a)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(a))
    assert points(intersection(a, b)) == points(left) & points(right)
    assert points(difference(a, b)) == points(left) - points(right)
    assert length(a) == len(points(left))
    assert length(difference(a, b)) + length(intersection(a, b)) == length(a)
