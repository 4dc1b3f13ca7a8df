"""The canonical tree: one sum, however its leaves are cut into runs."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.tree import TreeSum, cover, run_of

leaves = st.integers(1, 40)


def by_definition(values: list[numpy.ndarray]) -> numpy.ndarray:
    """Halve, the left half getting the odd one; add the halves' sums."""
    if len(values) == 1:
        return values[0]
    middle = (len(values) + 1) // 2
    return by_definition(values[:middle]) + by_definition(values[middle:])


def in_runs(values: list[numpy.ndarray], cuts: list[int]) -> numpy.ndarray:
    """Add each run up by itself, then all that is left of them."""
    count = len(values)
    whole = TreeSum[numpy.ndarray](count, lambda left, right: left + right)
    for first, last in zip([0, *cuts], [*cuts, count], strict=True):
        part = TreeSum[numpy.ndarray](count, lambda left, right: left + right)
        for leaf in range(first, last):
            part.put((leaf, leaf + 1), values[leaf])
        assert tuple(node for node, _ in part.parts) == cover(first, last, count)
        for node, value in part.parts:
            whole.put(node, value)
    assert len(whole.parts) == 1
    return whole.parts[0][1]


def wild(count: int, seed: int) -> list[numpy.ndarray]:
    """Make float32 numbers of sizes from 1e-12 to 1e12, of both signs."""
    generator = numpy.random.default_rng(seed)
    sizes = 10.0 ** generator.integers(-12, 12, (count, 1))
    return list((generator.standard_normal((count, 50)) * sizes).astype(numpy.float32))


@settings(deadline=None)
@given(leaves, st.integers(0, 1000), st.data())
def test_any_cut_gives_the_same_bits(count: int, seed: int, data: st.DataObject) -> None:
    values = wild(count, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=9)))
    actual = in_runs(values, cuts)
    assert actual.tobytes() == by_definition(values).tobytes()
    assert actual.dtype == numpy.float32


@settings(deadline=None)
@given(leaves, st.integers(1, 50))
def test_the_ranks_runs_are_all_leaves_and_evenly_many(count: int, world_size: int) -> None:
    runs = [run_of(rank, world_size, count) for rank in range(world_size)]
    assert [leaf for first, last in runs for leaf in range(first, last)] == list(range(count))
    lengths = [last - first for first, last in runs]
    assert max(lengths) - min(lengths) <= 1


def test_a_run_leaves_few_subtrees() -> None:
    for count in range(1, 70):
        for world_size in range(1, count + 1):
            for rank in range(world_size):
                assert len(cover(*run_of(rank, world_size, count), count)) <= 2 * count.bit_length()
    assert cover(0, 8, 16) == ((0, 8),)
    assert cover(5, 10, 16) == ((5, 6), (6, 8), (8, 10))


@pytest.mark.parametrize("odd", [numpy.nan, numpy.inf, -numpy.inf])
def test_what_is_not_finite_stays_what_it_is(odd: float) -> None:
    values = wild(16, 1)
    values[5][3] = odd
    for cuts in ([], [4, 9], [1, 2, 3, 14]):
        actual = in_runs(values, cuts)[3]
        assert numpy.isnan(actual) if numpy.isnan(odd) else actual == odd
    values[12][3] = -odd
    with numpy.errstate(invalid="ignore"):
        assert numpy.isnan(in_runs(values, [7])[3])


def test_its_error_is_no_worse_than_one_after_the_others() -> None:
    ours, theirs = [], []
    for seed in range(40):
        generator = numpy.random.default_rng(seed)
        values = list(generator.standard_normal((16, 2000)).astype(numpy.float32))
        right = numpy.sum([value.astype(numpy.float64) for value in values], axis=0)
        one_by_one = values[0]
        for value in values[1:]:
            one_by_one = one_by_one + value
        largest = numpy.abs(right).max()
        ours.append(numpy.abs(in_runs(values, [5, 10]) - right).max() / largest)
        theirs.append(numpy.abs(one_by_one - right).max() / largest)
    assert numpy.mean(ours) < numpy.mean(theirs)
    assert max(ours) <= max(theirs)
