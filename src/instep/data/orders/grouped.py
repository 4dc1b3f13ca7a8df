"""The order of samples that belong together: groups are shuffled, and the samples of each group. Pure: NumPy."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.order import Indices, Order, permute
from instep.data.orders.keyed import permute_each


class GroupedOrder(Order):
    """Every sample once an epoch, those of a group one after the other."""

    def __init__(self, seed: int, groups: Indices) -> None:
        """`groups`: the number of each sample's group, from 0 without gaps."""
        self._seed, self.num_samples = seed, len(groups)
        self._by_group = np.argsort(groups, kind="stable")
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._layout = lru_cache(maxsize=2)(self._compute_layout)  # two epochs meet where reading is ahead

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        layout, asked = self._layout(epoch), np.asarray(positions, dtype=np.int64)
        slots = np.searchsorted(layout.ends, asked, side="right")
        groups = layout.groups[slots]
        sizes = self._sizes[groups]
        places = asked - (layout.ends[slots] - sizes)
        rows = permute_each(f"{self._seed}/{epoch}/group", groups, sizes, places)
        indices: Indices = self._by_group[self._starts[groups] + rows]
        return indices

    def _compute_layout(self, epoch: int) -> _Layout:
        groups = permute(f"{self._seed}/{epoch}/groups", len(self._sizes), np.arange(len(self._sizes)))
        return _Layout(groups, np.cumsum(self._sizes[groups]))


class _Layout(NamedTuple):
    """Where the groups of an epoch stand."""

    groups: Indices
    """In their order."""
    ends: Indices
    """The position behind each group's samples."""
