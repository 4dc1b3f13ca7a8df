"""Batches of as many rows as fit into a number of tokens, and how an epoch is cut into them. Pure: NumPy, no torch.

[Note: Token batches]
Sorted by length, the longest first, the samples are cut into buckets. All batches of a bucket have as many rows as fit
if each is as long as the longest of the bucket. The samples of a bucket fill its batches; only the last bucket, of the
shortest ones, may have a smaller batch at its end. So the sizes of all batches, and the positions of their rows, are
the same in every epoch, at any world size. What changes from epoch to epoch is which samples of a bucket stand at its
positions, and at which step each batch comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from instep.core.errors import SpecError
from instep.data.batch_plan import Batch, BatchPlan
from instep.data.order import Indices, permute

_LOOKUP_BATCHES = 1024
"""Batches whose numbers are looked up at once."""


@dataclass(frozen=True, eq=False)
class TokenBatches:
    """The batches of an epoch, by bucket, before they are permuted."""

    batch_tokens: int
    rows: Indices
    """The rows of a full batch of each bucket."""
    first_positions: Indices
    """The first position of each bucket, and behind the last one the number of samples."""
    tokens: Indices
    """Of all samples of each bucket."""

    @classmethod
    def cut(
        cls, lengths: Indices, batch_tokens: int, window: int | None, spread: float, least_batches: int
    ) -> TokenBatches:
        """Cut samples, of which these are the lengths, the longest first, into buckets."""
        firsts, all_rows, ascending = [0], [], -lengths
        while (first := firsts[-1]) < len(lengths):
            longest = max(1, int(lengths[first]))
            rows, left = batch_tokens // longest, len(lengths) - first
            assert rows >= 1, "a sample longer than a batch"
            if window is None:
                alike = int(np.searchsorted(ascending, -longest / spread, side="right")) - first
                count = max(alike // rows, least_batches)
            else:
                count = max(1, window // rows)
            count = min(count, left // rows)
            # What does not fill another batch: then one batch of this bucket is smaller.
            size = left if left - count * rows < rows else count * rows
            firsts.append(first + size)
            all_rows.append(rows)
        tokens = np.add.reduceat(lengths, firsts[:-1], dtype=np.int64)
        return cls(batch_tokens, np.array(all_rows), np.array(firsts), tokens)

    @cached_property
    def first_batches(self) -> Indices:
        """The number of the first batch of each bucket, and behind the last one the number of batches."""
        return np.append(0, np.cumsum(-(-np.diff(self.first_positions) // self.rows)))

    @property
    def last_rows(self) -> int:
        """The rows of the last batch of the last bucket."""
        return int((self.first_positions[-1] - self.first_positions[-2] - 1) % self.rows[-1]) + 1

    @property
    def has_short(self) -> bool:
        """Whether the last batch of the last bucket is smaller than the others of it."""
        return self.last_rows < int(self.rows[-1])

    @cached_property
    def sizes(self) -> list[int]:
        """The sizes of batches that there are, without that of a smaller last one."""
        counts = np.diff(self.first_positions) // self.rows
        return sorted(set(self.rows[counts > 0].tolist()))

    @property
    def largest(self) -> int:
        """The rows of the largest batch."""
        return max([*self.sizes, self.last_rows])

    def batch(self, number: int) -> tuple[int, int]:
        """Return the first position of a batch, and its rows."""
        bucket = int(np.searchsorted(self.first_batches, number, side="right")) - 1
        rows = int(self.rows[bucket])
        first = int(self.first_positions[bucket]) + (number - int(self.first_batches[bucket])) * rows
        return first, min(rows, int(self.first_positions[bucket + 1]) - first)

    def num_tokens(self, first_position: int, num_rows: int) -> int:
        """Return how many tokens so many rows of a bucket have, if all of its rows had as many."""
        bucket = int(np.searchsorted(self.first_positions, first_position, side="right")) - 1
        size = int(self.first_positions[bucket + 1] - self.first_positions[bucket])
        return round(num_rows * int(self.tokens[bucket]) / size)

    def all_batches(self) -> tuple[Indices, Indices]:
        """Return the first positions and the rows of all batches."""
        counts = np.diff(self.first_batches)
        within: Indices = np.arange(self.first_batches[-1]) - np.repeat(self.first_batches[:-1], counts)
        rows = np.repeat(self.rows, counts)
        firsts: Indices = np.repeat(self.first_positions[:-1], counts) + within * rows
        return firsts, np.minimum(rows, np.repeat(self.first_positions[1:], counts) - firsts)


@dataclass(frozen=True)
class TokenPlan(BatchPlan):
    """How an epoch is cut into global batches of about the same number of tokens; `batch_size` is the largest."""

    seed: int = 0
    batches: TokenBatches = field(kw_only=True)

    @cached_property
    def num_batches(self) -> int:
        """The number of global batches, that is optimizer steps, in one epoch."""
        return int(self.batches.first_batches[-1]) - (self.drop_last and self.batches.has_short)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, self.num_batches)
        group, place = divmod(number, _LOOKUP_BATCHES)
        return Batch(epoch, *self.batches.batch(int(self._numbers(epoch, group)[place])))

    def num_tokens(self, batch: Batch) -> int:
        """Return about how many tokens a batch has, without padding: exact as the sum over an epoch."""
        return self.batches.num_tokens(batch.first_position, batch.size)

    def num_alike(self, batch: Batch) -> int:
        """Return 1: the batch of the next step may have another size, and stands elsewhere."""
        del batch
        return 1

    @property
    def smallest_part(self) -> int:
        """The rows, over all ranks, of the smallest micro-batch of an epoch."""
        sizes = {*self.batches.sizes} | ({self.batches.last_rows} if not self.drop_last else set())
        return min(part.micro_rows for size in sizes for part in self.parts(size, 1, 0))

    def check_world(self, world_size: int) -> None:
        """Raise SpecError if ranks would have no samples of their own in any step."""
        count = self.num_shards(self.batch_size) if self.shards else self.batch_size // self.accumulate
        if count < world_size:
            parts = f" in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
            shards = f", in {count} shards" if self.shards else ""
            raise SpecError(
                f"batch_tokens={self.batches.batch_tokens}{parts}: the largest batch has {self.batch_size} samples"
                f"{shards}, too few for {world_size} ranks. Use more tokens, or at most {max(1, count)} processes."
            )

    def _full_size(self, size: int) -> int:
        return size

    @cached_property
    def _numbers(self) -> Callable[[int, int], Indices]:
        """Return the numbers of a group of batches of an epoch."""

        def look_up(epoch: int, group: int) -> Indices:
            first = group * _LOOKUP_BATCHES
            positions = np.arange(first, min(first + _LOOKUP_BATCHES, self.num_batches))
            return permute(f"{self.seed}/{epoch}/batches", self.num_batches, positions)

        return lru_cache(maxsize=2)(look_up)
