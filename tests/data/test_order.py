"""The order of the samples: a permutation, well mixed, the same at any world size, and cheap."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.order import SampleOrder

sizes = st.one_of(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1023, 1024, 1025, 4096, 9973]))
seeds = st.one_of(st.integers(0, 10), st.integers(-(2**100), 2**100))
epochs = st.integers(0, 10**9)


def whole(seed: int, num_samples: int, epoch: int = 0) -> np.ndarray:
    return SampleOrder(seed, num_samples).indices(epoch, np.arange(num_samples))


def excess(counts: np.ndarray, expected: float, freedom: int) -> float:
    """How many standard deviations chi-square lies above what chance gives."""
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@settings(deadline=None)  # others may be using the machine
@given(seeds, sizes, epochs)
def test_every_epoch_is_a_permutation(seed: int, num_samples: int, epoch: int) -> None:
    order = whole(seed, num_samples, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(deadline=None)  # others may be using the machine
@given(seeds, st.integers(1, 2**62), epochs, st.data())
def test_any_position_can_be_asked_alone(seed: int, num_samples: int, epoch: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20, unique=True)))
    order = SampleOrder(seed, num_samples)
    together = order.indices(epoch, positions)
    assert together.min() >= 0
    assert together.max() < num_samples
    assert len(set(together.tolist())) == len(positions)
    assert together.tolist() == [int(order.indices(epoch, [p])[0]) for p in positions.tolist()]


def test_a_stretch_longer_than_a_block_is_the_same_as_its_pieces() -> None:
    order = SampleOrder(3, 10**6 + 3)
    pieces = [order.indices(2, np.arange(start, start + 1000)) for start in range(0, 30_000, 1000)]
    assert np.array_equal(order.indices(2, np.arange(30_000)), np.concatenate(pieces))
    assert np.array_equal(
        order.indices(2, np.arange(30_000).reshape(300, 100)), np.concatenate(pieces).reshape(300, 100)
    )


def test_the_order_stays_what_it_was() -> None:
    """Another order would break every run that is continued with a newer instep."""
    assert whole(0, 10).tolist() == [5, 4, 3, 2, 7, 1, 0, 8, 6, 9]
    assert SampleOrder(-1, 10**9).indices(7, np.arange(5)).tolist() == [
        774234913,
        795113186,
        601614770,
        840606596,
        411250758,
    ]


@settings(deadline=None)  # others may be using the machine
@given(seeds, st.integers(100, 5000), epochs)
def test_other_epochs_and_seeds_give_other_orders(seed: int, num_samples: int, epoch: int) -> None:
    order = whole(seed, num_samples, epoch)
    for other in (whole(seed, num_samples, epoch + 1), whole(seed + 1, num_samples, epoch)):
        # Two unrelated permutations agree in one place on average; in 12 with a probability of 1e-9.
        assert (order == other).sum() < 12


def test_seed_and_epoch_are_not_mixed_up() -> None:
    assert not np.array_equal(whole(1, 1000, 11), whole(11, 1000, 1))
    assert not np.array_equal(whole(1, 1000, 0), whole(-1, 1000, 0))
    assert not np.array_equal(whole(0, 1000, 0), whole(2**64, 1000, 0))


@pytest.mark.parametrize("num_samples", [3, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_frequent(num_samples: int) -> None:
    kinds = math.factorial(num_samples)
    tries = min(20 * kinds, 3000)
    counts = Counter(tuple(whole(seed, num_samples).tolist()) for seed in range(tries))
    frequencies = np.array([counts[p] for p in itertools.permutations(range(num_samples))])
    assert excess(frequencies, tries / kinds, kinds - 1) < 4


@pytest.mark.parametrize("num_samples", [10, 37])
def test_every_sample_is_equally_frequent_at_every_position(num_samples: int) -> None:
    tries = 1000
    matrix = np.zeros((num_samples, num_samples))
    for seed in range(tries):
        matrix[np.arange(num_samples), whole(seed, num_samples, epoch=seed % 3)] += 1
    assert abs(excess(matrix, tries / num_samples, (num_samples - 1) ** 2)) < 4


@pytest.mark.parametrize("num_samples", [1000, 60_000, 10**9])
def test_neighbours_are_torn_apart(num_samples: int) -> None:
    order = SampleOrder(5, num_samples).indices(1, np.arange(min(num_samples, 60_000)))
    distances = np.diff(order) % num_samples
    counts = np.histogram(distances, bins=50, range=(0, num_samples))[0]
    assert abs(excess(counts, len(distances) / 50, 49)) < 4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / math.sqrt(len(order))


def test_the_first_batch_of_a_billion_samples_takes_no_time_and_no_memory() -> None:
    order = SampleOrder(0, 10**9)
    order.indices(0, np.arange(64))
    tracemalloc.start()
    order.indices(1, np.arange(64))
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 1_000_000

    seconds = []
    for epoch in range(20):
        start = time.perf_counter()
        order.indices(epoch, np.arange(64))
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 3e-3
