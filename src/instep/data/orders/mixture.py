"""The order of a mixture: so many samples of each source in every batch. Pure: NumPy, no torch.

[Note: Mixtures]
At step k, with weights w and a batch of B rows, the sources get the rows between floor(B · W + u) of the cumulative,
normalized weights W: B in all, none below zero, and each within one of B · w. The offset u moves from step to step by
the golden ratio, from a hash of the seed on, so that what a source has had after any number of steps stays within a few
samples of what its weights ask for. How many it had before a step is a sum over all earlier steps. It is computed in
chunks, from weights that are a function of the step, and so does not have to be in a checkpoint. Each source has an
order of its own, and begins its next epoch when it is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.batch_plan import BatchSpec
from instep.data.order import Indices, Order
from instep.data.orders.keyed import hash64, permute_each

_CHUNK_STEPS = 8192
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio

WeightsOf = Callable[[Indices], npt.NDArray[np.float64]]
"""Returns the weights of all sources at some steps: a row for each step, or one row for all."""


class MixtureOrder(Order):
    """Samples of several sources, numbered one source after the other."""

    def __init__(
        self,
        batches: BatchSpec,
        orders: dict[str, Order],
        sizes: Sequence[int],
        weights_of: WeightsOf,
        num_samples: int,
    ) -> None:
        """`orders`: that of each source by name; `sizes`: the samples that each source has."""
        plan = batches.plan(num_samples)
        self._seed, self._batch_size, self._num_batches = batches.seed, batches.batch_size, plan.num_batches
        self.num_samples = plan.num_batches * plan.batch_size if batches.drop_last else num_samples
        self.has_window = any(order.has_window for order in orders.values())
        self._names, self._orders = list(orders), list(orders.values())
        self._first_indices = np.cumsum([0, *sizes])[:-1]
        self._shares = _Shares(self._seed, len(orders), weights_of, self._sizes)

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        asked = np.asarray(positions, dtype=np.int64)
        indices = np.empty(asked.size, dtype=np.int64)
        for source, own_epoch, here, places in self._located(epoch, asked.reshape(-1)):
            indices[here] = self._first_indices[source] + self._orders[source].indices(own_epoch, places)
        return indices.reshape(asked.shape)

    def draws(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return hashes of the source, its epoch, and what the source's own order draws from."""
        asked = np.asarray(positions, dtype=np.int64)
        draws = np.empty(asked.size, dtype=np.int64)
        for source, own_epoch, here, places in self._located(epoch, asked.reshape(-1)):
            order = self._orders[source]
            numbers = order.draws(own_epoch, places)
            numbers = order.indices(own_epoch, places) if numbers is None else numbers
            draws[here] = (hash64("mixture", source, own_epoch, numbers) >> 1).astype(np.int64)
        return draws.reshape(asked.shape)

    def taken(self, num_steps: int) -> dict[str, int]:
        """Return how many samples of each source the first steps of a run have."""
        return dict(zip(self._names, self._shares.before(num_steps).tolist(), strict=True))

    def _sizes(self, steps: Indices) -> Indices:
        """Return the sizes of the batches of some steps, counted over all epochs."""
        last = self.num_samples - (self._num_batches - 1) * self._batch_size
        return np.where((steps + 1) % self._num_batches == 0, last, self._batch_size)

    def _located(self, epoch: int, positions: Indices) -> Iterator[tuple[int, int, Indices, Indices]]:
        """Yield source, epoch of the source, which entries these are, and their positions in that epoch."""
        numbers, rows = np.divmod(positions, self._batch_size)
        steps = numbers + epoch * self._num_batches
        rows = permute_each(f"{self._seed}/mixture", steps, self._sizes(steps), rows)
        sources, counts = self._shares.locate(steps, rows)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            own_epochs, places = np.divmod(counts[here], self._orders[source].num_samples)
            for own_epoch in np.unique(own_epochs).tolist():
                chosen = own_epochs == own_epoch
                yield source, own_epoch, here[chosen], places[chosen]


class _Chunk(NamedTuple):
    """Consecutive steps, a row each."""

    ends: Indices
    """The row of the batch, before rows are shuffled, behind those of each source."""
    before: Indices
    """How many samples each source had before the step; one row more than there are steps."""


class _Shares:
    """How many samples each source has in each step, and had before it."""

    def __init__(
        self, seed: int, num_sources: int, weights_of: WeightsOf, sizes_of: Callable[[Indices], Indices]
    ) -> None:
        self._start = hash64(f"{seed}/shares")
        self._weights_of, self._sizes_of = weights_of, sizes_of
        self._totals = [np.zeros(num_sources, dtype=np.int64)]
        """Before each chunk that was computed so far."""
        self._chunk = lru_cache(maxsize=4)(self._compute_chunk)

    def before(self, step: int) -> Indices:
        """Return how many samples each source had before a step."""
        number, place = divmod(step, _CHUNK_STEPS)
        before: Indices = self._chunk(number).before[place]
        return before

    def locate(self, steps: Indices, rows: Indices) -> tuple[Indices, Indices]:
        """Return the source of each row, and how many samples of it came before, over all steps."""
        sources, counts = np.empty_like(rows), np.empty_like(rows)
        numbers, places = np.divmod(steps, _CHUNK_STEPS)
        for number in np.unique(numbers).tolist():
            chunk, here = self._chunk(number), np.flatnonzero(numbers == number)
            place, row = places[here], rows[here]
            ends = chunk.ends[place]
            source = (ends <= row[:, None]).sum(axis=1)
            starts = np.where(source > 0, ends[np.arange(len(here)), source - 1], 0)
            sources[here], counts[here] = source, chunk.before[place, source] + row - starts
        return sources, counts

    def _compute_chunk(self, number: int) -> _Chunk:
        while len(self._totals) <= number:
            ends = self._ends(len(self._totals) - 1).sum(axis=0)
            self._totals.append(self._totals[-1] + np.diff(ends, prepend=0))
        ends = self._ends(number)
        before = np.zeros((len(ends) + 1, ends.shape[1]), dtype=np.int64)
        np.cumsum(np.diff(ends, axis=1, prepend=0), axis=0, out=before[1:])
        before += self._totals[number]
        return _Chunk(ends, before)

    def _ends(self, number: int) -> Indices:
        """Return the row behind those of each source, in the steps of a chunk."""
        steps = np.arange(number * _CHUNK_STEPS, (number + 1) * _CHUNK_STEPS)
        weights = np.cumsum(self._weights_of(steps), axis=1)
        offsets = ((steps.view(np.uint64) * _GOLDEN + self._start) >> 11).astype(np.float64)[:, None] * 2.0**-53
        sizes = self._sizes_of(steps)[:, None]
        # The sum with an offset just below 1 may be rounded up to one row too many.
        ends: Indices = np.minimum((sizes * (weights / weights[:, -1:]) + offsets).astype(np.int64), sizes)
        return ends
