"""The order of the samples, and how batches are cut into parts for the ranks. Pure arithmetic: NumPy, no torch.

[Note: Sample order]
The order of an epoch is a permutation of the sample indices, of which any range can be computed by itself. A
Feistel network permutes a grid of `height × width` cells, both close to √N and together more than N: a
cell is (left, right), and each round shifts one coordinate by a keyed hash of the other, which is
invertible and therefore a permutation of the grid. A cell beyond the last sample is permuted again
until it is a sample (cycle walking), which keeps it a permutation; about 1 cell in √N needs it.
The height is even: on an odd × odd grid the rounds reach only the even permutations, which at N = 6 makes
some orders several times as frequent as others.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError, SpecError
from instep.core.tree import run_of

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# With 8 rounds, the counts of all orders (N = 5, 6, 7) and of pairs (N = 12, 30) over many seeds are visibly
# uneven; from N = 100 on they are even over 3 million seeds. With 16 rounds they are even for every N.
_ROUNDS, _ROUNDS_IF_FEW, _FEW = 8, 16, 1024
_BLOCK = 8192  # positions permuted at once: the scratch arrays stay in the processor's cache
_MOST_SAMPLES = 1 << 62  # coordinates and hashes are multiplied in 64 bits, so √N has to fit in 32
# Arrays of one number: NumPy converts its own scalars again in every operation.
_ODD_1, _ODD_2, _HALF = (np.array(n, np.uint64) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 32))


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples in every epoch: a pure function of (seed, epoch, position)."""

    seed: int
    num_samples: int

    def __post_init__(self) -> None:
        _check_num_samples(self.num_samples)

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch, in memory proportional to their number."""
        cells = np.array(positions, dtype=np.int64)
        assert cells.size == 0 or (cells.min() >= 0 and cells.max() < self.num_samples), "position not in the epoch"
        flat = cells.reshape(-1).view(np.uint64)
        keys = _round_keys(self.seed, epoch, _ROUNDS if self.num_samples >= _FEW else _ROUNDS_IF_FEW)
        for start in range(0, flat.size, _BLOCK):
            _permute(flat[start : start + _BLOCK], self.num_samples, keys)
        return cells


def _round_keys(seed: int, epoch: int, rounds: int) -> list[_Words]:
    digests = [  # each has 8 keys of 8 bytes
        hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), person=b"instep.order").digest()
        for number in range(rounds // 8)
    ]
    return np.split(np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64), rounds)


def _permute(cells: _Words, num_samples: int, keys: list[_Words]) -> None:
    """Permute 0..num_samples-1, in place."""
    height = math.isqrt(num_samples) // 2 * 2 + 2
    width = num_samples // height + 1
    sides = np.array(height, np.uint64), np.array(width, np.uint64)
    _shuffle_grid(cells, *sides, keys)
    while (beyond := np.flatnonzero(cells >= np.uint64(num_samples))).size:
        walked = cells[beyond]
        _shuffle_grid(walked, *sides, keys)
        cells[beyond] = walked


def _shuffle_grid(cells: _Words, height: _Words, width: _Words, keys: list[_Words]) -> None:
    left = cells // width
    right = cells - left * width
    scratch, spare = np.empty_like(cells), np.empty_like(cells)
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        _shift(left, right, key_left, height, scratch, spare)
        _shift(right, left, key_right, width, scratch, spare)
    np.multiply(left, width, out=cells)
    cells += right


def _shift(target: _Words, other: _Words, key: _Words, modulus: _Words, h: _Words, spare: _Words) -> None:
    """Add a keyed hash of `other` to `target`, modulo `modulus`."""
    np.bitwise_xor(other, key, out=h)
    h *= _ODD_1
    np.right_shift(h, _HALF, out=spare)
    h ^= spare
    h *= _ODD_2
    # A multiplication scales the upper half of the hash down to 0..modulus-1: a 64-bit remainder takes
    # several times as long. So would the one after the addition, hence the minimum: where the sum is
    # less than the modulus, the subtraction wraps around to a huge number.
    h >>= _HALF
    h *= modulus
    h >>= _HALF
    target += h
    np.subtract(target, modulus, out=spare)
    np.minimum(target, spare, out=target)


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
        _check_num_samples(self.num_samples)
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

    def _bounds(self, size: int) -> list[int]:
        count = min(self.accumulate, size)
        return [size * i // count for i in range(count + 1)]

    def _shards(self, size: int) -> tuple[PartPlan, ...]:
        """Cut a global batch into shards of one size; the last one of each micro-batch may be smaller."""
        rows = -(-max(b - a for a, b in itertools.pairwise(self._bounds(self.batch_size))) // self.shards)
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


def _check_num_samples(num_samples: int) -> None:
    if num_samples < 1:
        raise DataError(f"The dataset has {num_samples} samples, so there is nothing to train on. Give at least one.")
    if num_samples > _MOST_SAMPLES:
        raise DataError(f"The dataset has a length of {num_samples}; at most 2^62 samples are supported.")
