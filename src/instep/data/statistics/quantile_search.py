"""Exact quantiles of columns that do not fit into memory, by a few passes over the data.

[Note: Exact quantiles]
The bits of a double, read as an integer, have the order of the doubles (those of negative ones are flipped). A pass
counts, for each column, how many numbers begin with which bits; that says with which bits the numbers at the wanted
ranks begin, and the next pass looks at the numbers that begin so, and counts by the bits after those. When few are
left, a last pass collects them. Counts of several processes are added up, so that the result is exact, and the same at
any number of processes. A sketch (KLL, t-digest) needs one pass only, but it has an error, and the result depends on
how the data was split. Two or three passes are enough for most data; six if hundreds of thousands of equal numbers
that are no short binary fractions (0.1, not 0.5) lie at a wanted rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instep.data.statistics.column_sums import Floats
from instep.data.statistics.search_pass import SearchPass, SearchPlan, values_of

_MAX_COLLECTED = 1 << 16
"""Numbers that the last pass may collect, over all columns."""


class QuantileSearch:
    """Finds quantiles of columns, with linear interpolation as in NumPy; NaN counts as missing.

    While `is_done` is false: add all the data to a `new_pass`, merge those of all processes, and give it to `take`.
    """

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.quantiles = np.asarray(quantiles, np.float64)
        self.is_done = False
        self.values: Floats = np.empty((0, 0))
        """The quantiles, (quantile, column); NaN for a column without numbers."""
        self._plan = SearchPlan()
        self._counts = np.zeros(0, np.int64)
        self._num_zeros = 0
        """How many of the last bits of all numbers are zero."""
        self._columns: list[int] = []
        self._ranks: list[int] = []
        """Of each wanted number, among those of its column that begin with its prefix."""
        self._prefixes: list[int] = []

    def new_pass(self) -> SearchPass:
        """Return what the next pass adds the data to."""
        return SearchPass(self._plan)

    def take(self, made: SearchPass) -> None:
        """Take a pass over all the data, and decide what the next one looks for."""
        if self._plan.is_first:
            self._begin(made)
        if self._plan.collects:
            collected = [made.sorted_keys(column) for column in range(len(self._counts))]
            self._finish(
                [int(collected[column][rank]) for column, rank in zip(self._columns, self._ranks, strict=True)]
            )
            return
        sizes: list[dict[int, int]] = [{} for _ in self._counts]
        for number, column in enumerate(self._columns):
            prefix, rank, size = made.find(column, self._prefixes[number], self._ranks[number])
            self._prefixes[number], self._ranks[number], sizes[column][prefix] = prefix, rank, size
        shift = self._plan.shift - made.bits
        if shift <= self._num_zeros:  # the bits after these are known
            self._finish([_completed(prefix, shift) for prefix in self._prefixes])
            return
        collects = sum(sum(each.values()) for each in sizes) <= _MAX_COLLECTED
        if collects:  # the numbers of all prefixes of a column come in one list
            for number, column in enumerate(self._columns):
                own = self._prefixes[number]
                self._ranks[number] += sum(size for prefix, size in sizes[column].items() if prefix < own)
        self._plan = SearchPlan(shift, tuple(tuple(each) for each in sizes), collects)

    def _begin(self, first: SearchPass) -> None:
        """Say which numbers are wanted, two for each quantile of each column that has numbers."""
        self._counts, self._num_zeros = first.counts_by_column(), first.num_zeros
        for column, count in enumerate(self._counts.tolist()):
            if count:
                low = np.floor(self.quantiles * (count - 1)).astype(np.int64)
                ranks = np.stack([low, np.minimum(low + 1, count - 1)], axis=1).reshape(-1).tolist()
                self._columns += [column] * len(ranks)
                self._ranks += ranks
        self._prefixes = [0] * len(self._columns)

    def _finish(self, keys: list[int]) -> None:
        """Interpolate between the two numbers of each quantile."""
        numbers = values_of(np.array(keys, np.int64)).reshape(-1, len(self.quantiles), 2)
        has_numbers = np.flatnonzero(self._counts)
        virtual = self.quantiles[:, None] * (self._counts[has_numbers] - 1)
        weight = virtual - np.floor(virtual)
        low, high = numbers[:, :, 0].T, numbers[:, :, 1].T
        with np.errstate(over="ignore", invalid="ignore"):
            step = high - low
            between = np.where(weight >= 0.5, high - step * (1 - weight), low + step * weight)
        self.values = np.full((len(self.quantiles), len(self._counts)), np.nan)
        self.values[:, has_numbers] = np.where(step == 0, low, between)
        self.is_done = True


def _completed(prefix: int, shift: int) -> int:
    """Return the key that begins with a prefix, and whose number ends in `shift` bits of zero."""
    return prefix << shift if prefix >= 0 else ((prefix + 1) << shift) - 1
