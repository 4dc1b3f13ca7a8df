"""Keyed hashes and permutations of many things at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.orders.keyed import hash64, permute_each, uniform


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 300)), min_size=1, max_size=20))
def test_each_is_a_permutation(parts: list[tuple[int, int]]) -> None:
    numbers = np.repeat([number for number, _ in parts], [size for _, size in parts])
    sizes = np.repeat([size for _, size in parts], [size for _, size in parts])
    positions = np.concatenate([np.arange(size) for _, size in parts])
    permuted = permute_each("key", numbers, sizes, positions)
    for number, size in parts:
        own = permute_each("key", number, size, np.arange(size))
        assert sorted(own.tolist()) == list(range(size))
        here = (numbers == number) & (sizes == size)
        assert permuted[here].reshape(-1, size).tolist() == [own.tolist()] * (np.count_nonzero(here) // size)


def test_all_permutations_are_equally_frequent() -> None:
    permuted = permute_each("key", np.arange(120_000)[:, None], 5, np.arange(5)[None])
    counts = np.unique(permuted @ [625, 125, 25, 5, 1], return_counts=True)[1]
    assert len(counts) == 120
    assert ((counts - 1000) ** 2 / 1000).sum() < 180  # 119 degrees of freedom: exceeded once in 4,000 keys


def test_hashes_are_uniform_and_of_every_number() -> None:
    numbers = uniform("key", np.arange(200_000))
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 160
    assert 0 <= numbers.min() < numbers.max() < 1
    hashes = [hash64(key, a, b)[0] for key in ("x", "y") for a in range(20) for b in range(20)]
    assert len(set(hashes)) == 800
