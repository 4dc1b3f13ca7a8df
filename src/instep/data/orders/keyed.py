"""Keyed hashes and permutations of many things at once, each with a key of its own. Pure: NumPy, no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from instep.core.splitmix import finalize64
from instep.data.order import Indices, round_keys, shuffle_grid

_Words = npt.NDArray[np.uint64]

_ROUNDS = 16  # as for few samples in `permute`: what is permuted here is often small
_BLOCK = 8192
_GOLDEN = 0x9E3779B97F4A7C15


def hash64(key: str, *numbers: npt.ArrayLike) -> _Words:
    """Return 64-bit hashes of a key and of these numbers, at most six, entry by entry; at least one entry."""
    first, *words, last = round_keys(key, 8)
    hashed: _Words = first
    for number, word in zip(numbers, words, strict=False):
        entries = np.atleast_1d(np.asarray(number, dtype=np.int64)).view(np.uint64)
        hashed = finalize64(hashed ^ (entries * _GOLDEN + word))
    mixed: _Words = finalize64(hashed ^ last)
    return mixed


def uniform(key: str, *numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), multiples of 2^-53, that are hashes of a key and of these numbers."""
    return (hash64(key, *numbers) >> 11).astype(np.float64) * 2.0**-53


def permute_each(key: str, numbers: npt.ArrayLike, sizes: npt.ArrayLike, positions: npt.ArrayLike) -> Indices:
    """Return what stands at each position of its own permutation: of 0..size-1, keyed by (key, number).

    The four are broadcast against each other; in memory and time proportional to their number.
    """
    shape = np.broadcast_shapes(np.shape(numbers), np.shape(sizes), np.shape(positions))
    number, size, cells = (
        np.array(np.broadcast_to(np.asarray(given, dtype=np.int64), shape)).reshape(-1)
        for given in (numbers, sizes, positions)
    )
    assert ((cells >= 0) & (cells < size)).all(), "position beyond its permutation"
    keys = round_keys(key, _ROUNDS)
    for start in range(0, cells.size, _BLOCK):
        here = slice(start, start + _BLOCK)
        _permute_each(cells[here].view(np.uint64), number[here].view(np.uint64), size[here], keys)
    return cells.reshape(shape)


def _permute_each(cells: _Words, numbers: _Words, sizes: Indices, keys: list[_Words]) -> None:
    # Rounding does no harm: the grid has to be close to a square, with an even height, and more cells than the size.
    heights = np.sqrt(sizes.astype(np.float64)).astype(np.int64) // 2 * 2 + 2
    widths = (sizes // heights + 1).view(np.uint64)
    words, tops = heights.view(np.uint64), sizes.view(np.uint64)
    spread = numbers * _GOLDEN
    own = [finalize64(spread + key) for key in keys]
    shuffle_grid(cells, words, widths, own)
    while (beyond := np.flatnonzero(cells >= tops)).size:
        walked = cells[beyond]
        shuffle_grid(walked, words[beyond], widths[beyond], [key[beyond] for key in own])
        cells[beyond] = walked
