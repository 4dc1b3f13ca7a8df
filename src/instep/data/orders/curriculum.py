"""The order of a curriculum: the easiest samples first, then more and more of them, then all.

[Note: Curriculum order]
At a step the easiest n samples are in use (Pacing), and they are used evenly: positions run through keyed permutations
of them, pass after pass. When n grows in the middle of a pass, the new samples join what is left of it; if less is left
than joins, a new pass over all n begins and what is left is shuffled into it. So new samples come among old ones, and
how often samples were used that became active together differs by two at most. Where n grows as fast as samples are
read, every sample comes once in the first epoch, easy ones earlier.

What joins is a pool of the places that were left and of new ranks, permuted again. A place leads back into the pool
before, and so on to the rank. The table of pools follows from the pacing alone, two or three entries for each level, so
which sample stands at a position stays a function of (seed, epoch, position).

When everything is in use, the epoch is read to its end, and from the next one on the order is the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.batch_plan import BatchSpec
from instep.data.order import Indices, Order, SampleOrder, permute
from instep.data.orders.pacing import Level, Pacing

Scores = npt.NDArray[np.float64]
RankingOf = Callable[[int], Indices]
"""Returns the sample indices, the easiest first, as they hold in an epoch."""


def rank_samples(seed: int, scores: Scores) -> Indices:
    """Return the sample indices by their scores, the lowest first; which of several alike comes first is drawn."""
    # Shuffled first, for a stable sort keeps the order of equals: a sort by two keys takes several times as long.
    ties = permute(f"{seed}/curriculum/ties", len(scores), np.arange(len(scores)))
    return ties[np.argsort(scores[ties], kind="stable")]


class _Pool(NamedTuple):
    """Ranks that are used once each, in an order of their own: places that were left, then new ranks."""

    key: str
    size: int
    carried: int = 0
    """How many of them are places of an earlier pool."""
    base: int = 0
    """The first of the new ranks."""
    earlier: _Pool | None = None
    taken: int = 0
    """How many places of the earlier one were used."""
    has_copies: bool = False
    """Whether a rank may be in it twice."""

    def ranks(self, places: Indices) -> Indices:
        """Return what stands at these places."""
        ranks, rest, pool = np.empty_like(places), np.arange(len(places)), self
        while True:
            drawn = permute(pool.key, pool.size, places)
            left = drawn < pool.carried
            ranks[rest[~left]] = drawn[~left] - pool.carried + pool.base
            rest, places = rest[left], pool.taken + drawn[left]
            if pool.earlier is None or not rest.size:
                return ranks
            pool = pool.earlier


class _Stretch(NamedTuple):
    """Positions during which the same samples are in use: first a pool, then passes over all of them."""

    start: int
    size: int
    """How many samples are in use."""
    pool: _Pool
    key: str

    def pass_at(self, offset: int) -> tuple[_Pool, int]:
        """Return the pool or the pass at an offset, and the place in it."""
        if offset < self.pool.size:
            return self.pool, offset
        number, place = divmod(offset - self.pool.size, self.size)
        return _Pool(f"{self.key}/pass {number}", self.size), place

    def ranks(self, offsets: Indices) -> Indices:
        """Return what stands at these offsets."""
        numbers = np.where(offsets < self.pool.size, -1, (offsets - self.pool.size) // self.size)
        ranks = np.empty_like(offsets)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            first = 0 if number < 0 else self.pool.size + number * self.size
            ranks[here] = self.pass_at(first)[0].ranks(offsets[here] - first)
        return ranks


class CurriculumOrder(Order):
    """The easiest samples first, then all."""

    def __init__(
        self, batches: BatchSpec, num_samples: int, pacing: Pacing, ranking_of: RankingOf, rescore: int = 0
    ) -> None:
        """`rescore`: after how many epochs there is another ranking, each time; until the first one, all are used."""
        plan = batches.plan(num_samples)
        self.num_samples = num_samples
        self._seed, self._ranking_of, self._rescore = batches.seed, ranking_of, rescore
        self._plain = SampleOrder(batches.seed, num_samples)
        self._steps_per_epoch, self._batch_size = plan.num_batches, batches.batch_size
        self._epoch_size = min(num_samples, plan.num_batches * batches.batch_size)
        """Positions of an epoch that are read; with drop_last some are not."""
        self._levels = pacing.levels(plan.num_batches)
        self.paced_epochs = pacing.num_epochs(plan.num_batches)
        """From this epoch on, the same samples are in use in every epoch."""
        self._last_size = self._size_of(self._levels[-1])
        self.uses_ranking_until = self.paced_epochs if self._last_size == num_samples else None
        """From which epoch on no ranking is asked for; None: there is none."""

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""
        if self._is_plain(epoch):
            return self._plain.indices(epoch, positions)
        asked = np.asarray(positions, dtype=np.int64)
        flat = asked.reshape(-1)
        ranks = self._paced_ranks(epoch, flat) if epoch < self.paced_epochs else self._last_ranks(epoch, flat)
        return self._ranking_of(epoch)[ranks].reshape(asked.shape)

    def draws(self, epoch: int, positions: npt.ArrayLike) -> Indices | None:
        """Return the positions while a sample may come twice in an epoch."""
        return None if self._is_plain(epoch) else np.array(positions, dtype=np.int64)

    def num_active(self, step: int) -> int:
        """Return how many samples are in use in a step."""
        if self._is_plain(step // self._steps_per_epoch):
            return self.num_samples
        return self._size_of(next(level for level in reversed(self._levels) if level.first_step <= step))

    def _is_plain(self, epoch: int) -> bool:
        return epoch < self._rescore or (self.uses_ranking_until is not None and epoch >= self.uses_ranking_until)

    def _size_of(self, level: Level) -> int:
        # Not one more because a product such as 0.7 * 10 is rounded up.
        return max(1, math.ceil(level.fraction * self.num_samples - 1e-9))

    def _paced_ranks(self, epoch: int, positions: Indices) -> Indices:
        places = epoch * self._epoch_size + positions
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        ranks = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            stretch = self._stretches[number]
            ranks[here] = stretch.ranks(places[here] - stretch.start)
        return ranks

    def _last_ranks(self, epoch: int, positions: Indices) -> Indices:
        """Return the ranks where only the easiest are used for good: whole passes, and anew in each epoch."""
        key = f"{self._seed}/curriculum/epoch {epoch}"
        return _Stretch(0, self._last_size, _Pool(key, self._last_size), key).ranks(positions)

    @cached_property
    def _starts(self) -> Indices:
        return np.array([stretch.start for stretch in self._stretches], dtype=np.int64)

    @cached_property
    def _stretches(self) -> Sequence[_Stretch]:
        """The table of positions, counted over all epochs, up to the end of the pacing."""
        stretches: list[_Stretch] = []
        for start, size, is_new in self._changes():
            key = f"{self._seed}/curriculum/{len(stretches)}"
            pool = _Pool(f"{key}/pool", size)
            if stretches and not is_new and size >= stretches[-1].size:
                pool = _join(pool, stretches[-1], start, size)
            stretches.append(_Stretch(start, size, pool, key))
        return stretches

    def _changes(self) -> Iterator[tuple[int, int, bool]]:
        """Yield from which position on how many samples are in use, and whether by another ranking."""
        first = self._rescore * self._epoch_size
        sizes = {self._position(level.first_step): self._size_of(level) for level in self._levels}
        rescored = range(self._rescore, self.paced_epochs, self._rescore) if self._rescore else range(1)
        renewed = {epoch * self._epoch_size for epoch in rescored}
        size = 0
        for start in sorted(sizes.keys() | renewed):
            before, size = size, sizes.get(start, size)
            if start >= first and (size != before or start in renewed):
                yield start, size, start in renewed

    def _position(self, step: int) -> int:
        epoch, number = divmod(step, self._steps_per_epoch)
        return epoch * self._epoch_size + number * self._batch_size


def _join(pool: _Pool, before: _Stretch, start: int, size: int) -> _Pool:
    """Return the pool of the samples that are new at a position, and of what is left of the pass under way."""
    earlier, taken = before.pass_at(start - before.start)
    left, new = earlier.size - taken, size - before.size
    if left < new and not earlier.has_copies:
        return pool._replace(size=left + size, carried=left, earlier=earlier, taken=taken, has_copies=left > 0)
    return _Pool(pool.key, left + new, left, before.size, earlier, taken, earlier.has_copies)
