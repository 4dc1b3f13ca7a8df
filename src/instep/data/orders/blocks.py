"""The order of samples that lie in blocks, of which each is read at once: shuffled in two levels.

[Note: Shuffling blocks]
To read one sample of a file of a hundred thousand is to read its block, so an order that jumps from block to block at
every sample reads everything many times. Instead the blocks of an epoch are permuted, consecutive ones of that
order make up a window, and the samples of a window are permuted among themselves. Both levels are keyed permutations
([Note: Sample order]): which sample stands at a position is still a function of (seed, epoch, position), at any world
size, without a buffer whose content a checkpoint would have to hold. A reader needs the blocks of one window at a time,
each once.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.order import Indices, Order, OrderWindow, check_num_samples, permute

WINDOW_BLOCKS = 32
"""Blocks in a window, unless a person says how many samples it has."""


class BlockOrder(Order):
    """Every sample once an epoch: blocks shuffled, and the samples of each window of blocks."""

    has_window = True

    def __init__(self, seed: int, block_sizes: npt.ArrayLike, window: int | None = None) -> None:
        """`window`: about how many samples a window has, rounded up to whole blocks."""
        self._seed = seed
        self._sizes = np.array(block_sizes, dtype=np.int64)
        assert self._sizes.ndim == 1
        self.num_samples = int(self._sizes.sum())
        check_num_samples(self.num_samples)
        self._window = window or max(1, -(-self.num_samples * WINDOW_BLOCKS // len(self._sizes)))
        self._layout = lru_cache(maxsize=2)(self._compute_layout)  # two epochs meet where reading is ahead

    @cached_property
    def _first_indices(self) -> Indices:
        return np.cumsum(self._sizes) - self._sizes

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        layout, asked = self._layout(epoch), np.asarray(positions, dtype=np.int64)
        flat = asked.reshape(-1)
        windows = np.searchsorted(layout.window_starts, flat, side="right") - 1
        places = np.empty_like(flat)
        for window in dict.fromkeys(windows.tolist()):  # not np.unique, which imports np.ma: 50 ms at the first batch
            here = windows == window
            first, last = layout.window_starts[window], layout.window_starts[window + 1]
            key = f"{self._seed}/{epoch}/window {window}"
            places[here] = first + permute(key, int(last - first), flat[here] - first)
        slots = np.searchsorted(layout.ends, places, side="right")
        blocks = layout.blocks[slots]
        rows = places - (layout.ends[slots] - self._sizes[blocks])
        return (self._first_indices[blocks] + rows).reshape(asked.shape)

    def blocks_of_window(self, epoch: int, position: int) -> Indices:
        """Return the blocks whose samples stand around a position, to read them ahead."""
        layout = self._layout(epoch)
        window = int(np.searchsorted(layout.window_starts, position, side="right")) - 1
        first, last = np.searchsorted(layout.ends, layout.window_starts[window : window + 2], side="right")
        return layout.blocks[first:last]

    def window(self, epoch: int, position: int) -> OrderWindow:
        """Return the blocks whose samples stand around a position, and where the next ones begin."""
        starts = self._layout(epoch).window_starts
        end = int(starts[np.searchsorted(starts, position, side="right")])
        return OrderWindow(self.blocks_of_window(epoch, position), end)

    def _compute_layout(self, epoch: int) -> _Layout:
        blocks = permute(f"{self._seed}/{epoch}/blocks", len(self._sizes), np.arange(len(self._sizes)))
        blocks = blocks[self._sizes[blocks] > 0]
        sizes = self._sizes[blocks]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        number = starts // self._window
        first_of_window = np.flatnonzero(np.diff(number, prepend=-1))
        return _Layout(blocks, ends, np.append(starts[first_of_window], self.num_samples))


class _Layout(NamedTuple):
    """Where the blocks of an epoch stand."""

    blocks: Indices
    """In their order."""
    ends: Indices
    """The position behind each block's samples, before the samples of a window are shuffled."""
    window_starts: Indices
    """The first position of each window, and behind the last one the number of samples."""


def sizes_within(block_sizes: npt.ArrayLike, indices: npt.ArrayLike) -> Indices | None:
    """Return how many of these samples each block holds; None if they are not in the order of the blocks."""
    chosen = np.asarray(indices, dtype=np.int64)
    if len(chosen) and (np.diff(chosen) <= 0).any():
        return None
    bounds = np.append(0, np.cumsum(np.asarray(block_sizes, dtype=np.int64)))
    return np.diff(np.searchsorted(chosen, bounds)).astype(np.int64)
