"""How an epoch is cut into global batches, and these into parts for the ranks. Pure arithmetic: NumPy, no torch."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from instep.core.errors import SpecError
from instep.core.tree import run_of
from instep.data.order import check_num_samples


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The batches that a person asked for, in which order; the options of a training that the data depends on."""

    seed: int
    batch_size: int
    accumulate: int = 1
    drop_last: bool = False
    shards: int = 0
    """In exact mode, the number of shards of a full micro-batch at any world size; else 0."""
    shuffle_window: int | None = None
    """How many samples to shuffle among themselves, where the data lies in blocks; None: as many as the data says."""
    batch_tokens: int | None = None
    """The tokens of a batch, padding included, in place of its samples."""

    def plan(self, num_samples: int) -> "BatchPlan":
        """Return how an epoch of so many samples is cut."""
        if self.batch_tokens is not None:
            raise SpecError(
                f"batch_tokens={self.batch_tokens} needs the length of each sample, which this data does not tell. "
                "Return instep.data.bucketed(dataset, lengths) from train_data(), or use --batch-size."
            )
        return BatchPlan(num_samples, self.batch_size, self.accumulate, self.drop_last, self.shards)


class Batch(NamedTuple):  # not a dataclass: one is created in every step, and this is several times as fast
    """The position of one global batch."""

    epoch: int
    first_position: int
    """In the epoch."""
    size: int


class PartPlan(NamedTuple):
    """What one rank computes of one micro-batch."""

    first_row: int
    """The first of this rank's rows, in the global batch."""
    num_rows: int
    """This rank's rows."""
    micro_rows: int
    """The micro-batch's rows, over all ranks."""
    replicated: bool = False
    """Whether every rank computes the whole micro-batch, because it has fewer rows than there are ranks."""
    counted: bool = True
    """Whether this rank's result counts; only rank 0's does if the part is replicated."""
    shard: int = 0
    """In exact mode, the number of this shard in the global batch."""


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut into global batches, and these into parts."""

    num_samples: int
    batch_size: int
    accumulate: int = 1
    drop_last: bool = False
    shards: int = 0
    """In exact mode, the number of shards of a full micro-batch at any world size; else 0."""

    def __post_init__(self) -> None:
        check_num_samples(self.num_samples)
        for name in ("batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} is not possible: it must be at least 1.")
        if self.num_batches == 0:
            raise SpecError(
                f"drop_last leaves no batch at all: the training data has {self.num_samples} samples, fewer than "
                f"batch_size={self.batch_size}. Use a smaller batch_size, or no drop_last."
            )

    @cached_property
    def num_batches(self) -> int:
        """The number of global batches, that is optimizer steps, in one epoch."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, self.num_batches)
        first = number * self.batch_size
        return Batch(epoch, first, min(self.batch_size, self.num_samples - first))

    def num_tokens(self, batch: Batch) -> int | None:
        """Return about how many tokens a batch has, without padding; None: the plan does not know."""
        del batch
        return None

    def num_alike(self, batch: Batch) -> int:
        """Return how many batches of the epoch follow each other from this one on, itself included, with its size."""
        return (self.num_samples - batch.first_position) // batch.size

    @property
    def smallest_part(self) -> int:
        """The rows, over all ranks, of the smallest micro-batch of an epoch."""
        last = self.batch(self.num_batches - 1).size
        return min(part.micro_rows for size in (self.batch_size, last) for part in self.parts(size, 1, 0))

    def parts(self, size: int, world_size: int, rank: int) -> tuple[PartPlan, ...]:
        """Return a rank's parts of a global batch of `size` rows: one per micro-batch, or in exact mode its
        consecutive shards, of which there may be none.
        """
        assert size >= 1
        assert 0 <= rank < world_size
        if self.shards:
            first, last = run_of(rank, world_size, self.num_shards(size))
            return self._shards(size)[first:last]
        return tuple(
            _share(first, last - first, world_size, rank) for first, last in itertools.pairwise(self._bounds(size))
        )

    def num_shards(self, size: int) -> int:
        """Return the number of shards of a global batch of `size` rows."""
        return len(self._shards(size))

    def check_world(self, world_size: int) -> None:
        """Raise SpecError if ranks would have no samples in any step, where the spec alone does not tell."""
        del world_size

    def _full_size(self, size: int) -> int:
        """Return the size of a full batch, where a batch has `size` rows: its shards are as large as those of that."""
        del size
        return self.batch_size

    def _bounds(self, size: int) -> list[int]:
        count = min(self.accumulate, size)
        return [size * i // count for i in range(count + 1)]

    def _shards(self, size: int) -> tuple[PartPlan, ...]:
        """Cut a global batch into shards of one size; the last one of each micro-batch may be smaller."""
        micro_rows = max(b - a for a, b in itertools.pairwise(self._bounds(self._full_size(size))))
        rows = -(-micro_rows // self.shards)
        cuts = [
            (start, min(rows, last - start))
            for first, last in itertools.pairwise(self._bounds(size))
            for start in range(first, last, rows)
        ]
        return tuple(PartPlan(start, count, count, shard=number) for number, (start, count) in enumerate(cuts))


def _share(first_row: int, micro_rows: int, world_size: int, rank: int) -> PartPlan:
    if micro_rows < world_size:
        return PartPlan(first_row, micro_rows, micro_rows, replicated=True, counted=rank == 0)
    start, end = micro_rows * rank // world_size, micro_rows * (rank + 1) // world_size
    return PartPlan(first_row + start, end - start, micro_rows)
