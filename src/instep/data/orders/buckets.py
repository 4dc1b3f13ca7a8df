"""Orders of samples of different lengths, in which those of a batch have about the same. Pure: NumPy, no torch.

[Note: Buckets]
A batch is padded to its longest sample. The samples are sorted by length once, and cut into buckets of neighbours,
which are permuted anew in every epoch, each bucket by itself. So are the batches of all buckets. A bucket holds lengths
that are at most an eighth apart, and at least four batches: its samples meet others in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from instep.data.batch_plan import BatchPlan, BatchSpec
from instep.data.order import Indices, Order, check_num_samples, permute
from instep.data.orders.keyed import permute_each
from instep.data.orders.token_batches import TokenBatches, TokenPlan

_SPREAD = 1.125
"""How many times as long as its shortest sample the longest of a bucket may be,"""
_LEAST_BATCHES = 4
"""unless it would have fewer batches than this."""
_MEASURED_BATCHES = 2000
"""Batches of which the padding is counted."""


class BucketOrder(Order):
    """Every sample once an epoch; all batches but the last one have samples of similar lengths.

    The samples that are left over when all batches are full, which the last batch holds, are other ones in each epoch.
    """

    has_window = True

    def __init__(self, seed: int, lengths: Indices, batch_size: int, window: int | None = None) -> None:
        """`window`: about how many samples a bucket has."""
        self._seed, self._batch_size, self.num_samples = seed, batch_size, len(lengths)
        check_num_samples(self.num_samples)
        self._ranked = _ranked(lengths)
        self._lengths = lengths
        self._num_full = self.num_samples // batch_size
        self._bounds = self._cut(window)
        self._left_over = lru_cache(maxsize=2)(self._choose_left_over)  # two epochs meet where reading is ahead

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        asked = np.asarray(positions, dtype=np.int64)
        batches, rows = np.divmod(asked.reshape(-1), self._batch_size)
        left_over = self._left_over(epoch)
        is_last = batches >= self._num_full
        ranks = np.empty_like(batches)
        ranks[is_last] = left_over[rows[is_last]]
        ranks[~is_last] = self._ranks(epoch, batches[~is_last], rows[~is_last], left_over)
        return self._ranked[ranks].reshape(asked.shape)

    def notices(self) -> list[str]:
        """Return what share of the tokens is padding."""
        starts = np.arange(0, self.num_samples, self._batch_size)
        sizes = np.minimum(self._batch_size, self.num_samples - starts)
        return padding_notice(self._lengths, starts, sizes, lambda positions: self.indices(0, positions))

    def _ranks(self, epoch: int, batches: Indices, rows: Indices, left_over: Indices) -> Indices:
        """Return the ranks, by length, of rows of full batches."""
        if not batches.size:
            return batches
        numbers = permute(f"{self._seed}/{epoch}/batches", self._num_full, batches)
        buckets = np.searchsorted(self._bounds, numbers, side="right") - 1
        firsts = self._bounds[buckets] * self._batch_size
        sizes = self._bounds[buckets + 1] * self._batch_size - firsts
        places = permute_each(
            f"{self._seed}/{epoch}/bucket", buckets, sizes, numbers * self._batch_size + rows - firsts
        )
        places += firsts
        # Those that are left over are passed by: one more rank for each that lies before.
        return places + np.searchsorted(left_over - np.arange(len(left_over)), places, side="right")

    def _choose_left_over(self, epoch: int) -> Indices:
        """Return the ranks that the last batch of an epoch holds, ascending."""
        count = self.num_samples - self._num_full * self._batch_size
        return np.sort(permute(f"{self._seed}/{epoch}/left over", self.num_samples, np.arange(count)))

    def _cut(self, window: int | None) -> Indices:
        """Return the number of the first batch of each bucket, and behind the last one the number of batches."""
        if window is not None:
            return np.append(np.arange(0, self._num_full, max(1, window // self._batch_size)), self._num_full)
        sorted_lengths, bounds = self._lengths[self._ranked], [0]
        while bounds[-1] < self._num_full:
            shortest = max(1, int(sorted_lengths[bounds[-1] * self._batch_size]))
            alike = int(np.searchsorted(sorted_lengths, shortest * _SPREAD, side="right")) // self._batch_size
            bounds.append(min(max(alike, bounds[-1] + _LEAST_BATCHES), self._num_full))
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < _LEAST_BATCHES // 2:
            del bounds[-2]  # the longest samples should meet others, too
        return np.array(bounds)


class TokenOrder(Order):
    """Every sample once an epoch, in batches of as many rows as fit into a number of tokens."""

    has_window = True

    def __init__(self, seed: int, lengths: Indices, batch_tokens: int, window: int | None = None) -> None:
        """`window`: about how many samples a bucket has."""
        self._seed, self.num_samples = seed, len(lengths)
        check_num_samples(self.num_samples)
        self._lengths = lengths
        self._ranked = _ranked(-lengths)
        self._batches = TokenBatches.cut(
            lengths[self._ranked], batch_tokens, window, spread=_SPREAD, least_batches=_LEAST_BATCHES
        )

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        asked = np.asarray(positions, dtype=np.int64)
        starts = self._batches.first_positions
        buckets = np.searchsorted(starts, asked, side="right") - 1
        sizes = starts[buckets + 1] - starts[buckets]
        places = permute_each(f"{self._seed}/{epoch}/bucket", buckets, sizes, asked - starts[buckets])
        indices: Indices = self._ranked[starts[buckets] + places]
        return indices

    def plan(self, spec: BatchSpec) -> BatchPlan:
        """Return how its epochs are cut into batches of about the same number of tokens."""
        return TokenPlan(
            self.num_samples,
            self._batches.largest,
            spec.accumulate,
            spec.drop_last,
            spec.shards,
            seed=self._seed,
            batches=self._batches,
        )

    def notices(self) -> list[str]:
        """Return what share of the tokens is padding."""
        starts, sizes = self._batches.all_batches()
        return padding_notice(self._lengths, starts, sizes, lambda positions: self.indices(0, positions))


def _ranked(keys: Indices) -> Indices:
    """Return the indices that sort keys, those of equal keys in their order."""
    if np.abs(keys).max() < 2**15:
        return np.argsort(keys.astype(np.int16), kind="stable")  # a radix sort, many times as fast
    return np.argsort(keys, kind="stable")


def padding_notice(
    lengths: Indices, starts: Indices, sizes: Indices, indices: Callable[[Indices], Indices]
) -> list[str]:
    """Return one sentence: what share of the tokens is padding, and would be with batches of any samples.

    Counted in the first epoch, in some of its batches where there are many.
    """
    if len(starts) > _MEASURED_BATCHES:
        some = np.linspace(0, len(starts) - 1, _MEASURED_BATCHES).astype(np.int64)
        starts, sizes = starts[some], sizes[some]
    wasted = _padding(
        lengths, sizes, indices(np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)]))
    )
    count = int(sizes.sum())
    shuffled = _padding(lengths, sizes, permute("padding", len(lengths), np.arange(count)))
    return [
        f"bucketed: {wasted:.1%} of a batch's tokens are padding, if it is padded to its longest sample; with batches "
        f"of any samples {shuffled:.1%} would be."
    ]


def _padding(lengths: Indices, sizes: Indices, samples: Indices) -> float:
    """Return the share of padding in batches of these sizes, which hold these samples."""
    rows = lengths[samples]
    longest = np.maximum.reduceat(rows, np.cumsum(sizes) - sizes)
    padded = int((longest * sizes).sum())
    return 1 - int(rows.sum()) / padded if padded else 0.0
