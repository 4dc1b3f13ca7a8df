"""Blocks: every sample once an epoch, a window's blocks together, any position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import DataError
from instep.data.orders.blocks import BlockOrder, sizes_within

block_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda sizes: sum(sizes) > 0)
windows = st.one_of(st.none(), st.integers(1, 200))


@settings(deadline=None)
@given(block_sizes, windows, st.integers(0, 5), st.integers(0, 10**9))
def test_every_epoch_is_a_permutation(sizes: list[int], window: int | None, seed: int, epoch: int) -> None:
    order = BlockOrder(seed, sizes, window)
    assert np.array_equal(np.sort(order.indices(epoch, np.arange(sum(sizes)))), np.arange(sum(sizes)))


@settings(deadline=None)
@given(block_sizes, windows, st.data())
def test_any_position_can_be_asked_alone(sizes: list[int], window: int | None, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=20))
    whole = BlockOrder(1, sizes, window).indices(3, np.arange(sum(sizes)))
    assert BlockOrder(1, sizes, window).indices(3, positions).tolist() == whole[positions].tolist()


@settings(deadline=None)
@given(block_sizes, st.integers(1, 200), st.integers(0, 3))
def test_a_block_is_read_in_one_window(sizes: list[int], window: int, epoch: int) -> None:
    order = BlockOrder(1, sizes, window)
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    met = block_of[order.indices(epoch, np.arange(sum(sizes)))]
    for block in set(met.tolist()):
        positions = np.flatnonzero(met == block)
        first, last = int(positions[0]), int(positions[-1])
        assert last - first < window + 2 * max(sizes)
        assert block in order.blocks_of_window(epoch, first)
        assert block in order.blocks_of_window(epoch, last)


def test_epochs_and_seeds_differ() -> None:
    sizes = [10] * 50
    orders = [BlockOrder(seed, sizes, 100).indices(epoch, np.arange(500)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_a_billion_samples_take_no_memory_to_speak_of() -> None:
    order = BlockOrder(0, np.full(100_000, 10_000))
    assert order.num_samples == 10**9
    assert len(np.unique(order.indices(2, np.arange(10**9 - 1000, 10**9)))) == 1000


@given(block_sizes, st.data())
def test_the_blocks_of_some_samples(sizes: list[int], data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, sum(sizes) - 1))))
    counts = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[chosen], minlength=len(sizes))
    assert np.array_equal(sizes_within(sizes, chosen), counts)
    if len(chosen) > 1:
        assert sizes_within(sizes, chosen[::-1]) is None


def test_no_samples_at_all() -> None:
    with pytest.raises(DataError, match="0 samples"):
        BlockOrder(0, [0, 0])
