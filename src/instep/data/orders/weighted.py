"""Orders in which some samples come more often than others: by weight, or so that classes come equally often.

[Note: Weighted samples]
With replacement, the sample at a position is where a hash of (seed, epoch, position) falls among the cumulative
weights. Hashes have 53 bits, and so have the cumulative weights (float64): a sample with less than 2^-53 of the total
weight may never come. Without replacement, each sample gets the key -log(u) / weight, with u a hash of (seed, epoch,
sample); the smallest keys are drawn (Efraimidis and Spirakis, 2006), which is the same law as to draw one after the
other. They are permuted afterwards: the heaviest would come first otherwise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from instep.data.order import Indices, Order, permute
from instep.data.orders.keyed import permute_each, uniform

Weights = npt.NDArray[np.float64]


class WeightedOrder(Order):
    """Samples drawn with replacement, each with a probability proportional to its weight."""

    def __init__(self, seed: int, weights: Weights, num_samples: int) -> None:
        self._seed, self.num_samples = seed, num_samples
        self._ends: Weights = np.cumsum(weights)
        self._last = int(np.flatnonzero(weights)[-1])

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        asked = np.asarray(positions, dtype=np.int64)
        where = uniform(f"{self._seed}/{epoch}/weighted", asked.reshape(-1)) * self._ends[-1]
        # The product may be rounded up to the total itself.
        chosen: Indices = np.minimum(np.searchsorted(self._ends, where, side="right"), self._last)
        return chosen.reshape(asked.shape)

    def draws(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the positions: a sample that comes twice is augmented differently."""
        del epoch
        return np.asarray(positions, dtype=np.int64)


class WeightedOnceOrder(Order):
    """Samples drawn without replacement: the heavier, the more likely in an epoch; each at most once."""

    def __init__(self, seed: int, weights: Weights, num_samples: int) -> None:
        self._seed, self.num_samples = seed, num_samples
        self._candidates: Indices = np.flatnonzero(weights)
        self._weights = weights[self._candidates]
        self._chosen = lru_cache(maxsize=2)(self._choose)  # two epochs meet where reading is ahead

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        return self._chosen(epoch)[permute(f"{self._seed}/{epoch}/drawn", self.num_samples, positions)]

    def _choose(self, epoch: int) -> Indices:
        """Return the samples of an epoch, in the dataset's order."""
        if self.num_samples == len(self._candidates):
            return self._candidates
        # 1 - u is in (0, 1], of which there is a logarithm.
        keys = -np.log1p(-uniform(f"{self._seed}/{epoch}/keys", self._candidates)) / self._weights
        largest = np.partition(keys, self.num_samples - 1)[self.num_samples - 1]
        chosen = keys < largest
        ties = np.flatnonzero(keys == largest)
        chosen[ties[: self.num_samples - np.count_nonzero(chosen)]] = True
        samples: Indices = self._candidates[chosen]
        return samples


class BalancedOrder(Order):
    """Classes equally often, the samples of a class equally often.

    Positions are counted over all epochs. Of C classes, each C positions in a row have one sample of each class, in an
    order of their own; the samples of a class come in a permutation, then in another one, over and over.
    """

    def __init__(self, seed: int, classes: Indices, num_samples: int) -> None:
        """`classes`: the number of each sample's class, from 0 without gaps."""
        self._seed, self.num_samples = seed, num_samples
        self._by_class: Indices = np.argsort(classes, kind="stable")
        self._sizes = np.bincount(classes)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        rounds, places = np.divmod(self._overall(epoch, positions), len(self._sizes))
        classes = permute_each(f"{self._seed}/classes", rounds, len(self._sizes), places)
        sizes = self._sizes[classes]
        cycles, places = np.divmod(rounds, sizes)
        rows = permute_each(f"{self._seed}/class samples", cycles * len(self._sizes) + classes, sizes, places)
        indices: Indices = self._by_class[self._starts[classes] + rows]
        return indices

    def draws(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the positions: a sample that comes twice is augmented differently."""
        del epoch
        return np.asarray(positions, dtype=np.int64)

    def _overall(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        return np.asarray(positions, dtype=np.int64) + epoch * self.num_samples
