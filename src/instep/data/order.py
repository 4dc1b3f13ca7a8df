"""The order of the samples: which one stands at which position of an epoch. Pure arithmetic: NumPy, no torch.

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
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError

if TYPE_CHECKING:
    from instep.data.batch_plan import BatchPlan, BatchSpec

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# With 8 rounds, the counts of all orders (N = 5, 6, 7) and of pairs (N = 12, 30) over many seeds are visibly
# uneven; from N = 100 on they are even over 3 million seeds. With 16 rounds they are even for every N.
_ROUNDS, _ROUNDS_IF_FEW, _FEW = 8, 16, 1024
_BLOCK = 8192  # positions permuted at once: the scratch arrays stay in the processor's cache
_MOST_SAMPLES = 1 << 62  # coordinates and hashes are multiplied in 64 bits, so √N has to fit in 32
# Arrays of one number: NumPy converts its own scalars again in every operation.
_ODD_1, _ODD_2, _HALF = (np.array(n, np.uint64) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 32))


class OrderWindow(NamedTuple):
    """Positions of an epoch whose samples lie in a few blocks of the dataset."""

    blocks: Indices
    end: int
    """The first position behind it."""


class Order(ABC):
    """Which sample stands at which position of an epoch: a pure function of (seed, epoch, position).

    A subclass implements `num_samples` and `indices`. It may keep arrays that describe the dataset (lengths, weights),
    and compute what it needs of an epoch when it is first asked for it, but nothing may depend on the rank, the world
    size, or which positions were asked for before: any rank asks for any positions of any epoch, in any order.
    """

    num_samples: int
    """The number of positions in an epoch."""
    has_window = False
    """Whether `shuffle_window` says how far samples are shuffled."""

    @abstractmethod
    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch."""

    def draws(self, epoch: int, positions: npt.ArrayLike) -> Indices | None:
        """Return numbers from which, with the seed and the epoch, the randomness at these positions comes.

        None: from the sample indices. An order in which a sample may come twice in an epoch returns numbers that
        differ, so that it is augmented differently each time.
        """
        del epoch, positions
        return None

    def window(self, epoch: int, position: int) -> "OrderWindow | None":
        """Return the blocks that samples around a position lie in, to fetch them ahead; None: there are no blocks."""
        del epoch, position
        return None

    def plan(self, spec: "BatchSpec") -> "BatchPlan":
        """Return how its epochs are cut into global batches."""
        return spec.plan(self.num_samples)

    def notices(self) -> list[str]:
        """Return what to tell the user once."""
        return []

    def taken(self, num_steps: int) -> dict[str, int] | None:
        """Return how many samples of each source the first steps of a run have; None: there is one source."""
        del num_steps
        return None


@dataclass(frozen=True)
class SampleOrder(Order):
    """Every sample once an epoch, all of them shuffled among themselves."""

    seed: int
    num_samples: int

    def __post_init__(self) -> None:
        check_num_samples(self.num_samples)

    def indices(self, epoch: int, positions: npt.ArrayLike) -> Indices:
        """Return the sample indices at these positions of an epoch, in memory proportional to their number."""
        return permute(f"{self.seed}/{epoch}", self.num_samples, positions)


def permute(key: str, size: int, positions: npt.ArrayLike) -> Indices:
    """Return what stands at these positions of a permutation of 0..size-1, of which each key has its own.

    In memory proportional to the number of positions, in time proportional to it.
    """
    cells = np.array(positions, dtype=np.int64)
    assert cells.size == 0 or (cells.min() >= 0 and cells.max() < size), "position beyond the permutation"
    flat = cells.reshape(-1).view(np.uint64)
    keys = round_keys(key, _ROUNDS if size >= _FEW else _ROUNDS_IF_FEW)
    for start in range(0, flat.size, _BLOCK):
        _permute(flat[start : start + _BLOCK], size, keys)
    return cells


def round_keys(key: str, rounds: int) -> list[_Words]:
    """Return so many words for a key, in arrays of one."""
    digests = [  # each has 8 keys of 8 bytes
        hashlib.blake2b(f"{key}/{number}".encode(), person=b"instep.order").digest() for number in range(rounds // 8)
    ]
    return np.split(np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64), rounds)


def _permute(cells: _Words, num_samples: int, keys: list[_Words]) -> None:
    """Permute 0..num_samples-1, in place."""
    height = math.isqrt(num_samples) // 2 * 2 + 2
    width = num_samples // height + 1
    sides = np.array(height, np.uint64), np.array(width, np.uint64)
    shuffle_grid(cells, *sides, keys)
    while (beyond := np.flatnonzero(cells >= np.uint64(num_samples))).size:
        walked = cells[beyond]
        shuffle_grid(walked, *sides, keys)
        cells[beyond] = walked


def shuffle_grid(cells: _Words, height: _Words, width: _Words, keys: list[_Words]) -> None:
    """Permute the cells of a grid, in place; sides and keys may differ from cell to cell."""
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


def check_num_samples(num_samples: int) -> None:
    """Raise DataError for a number of samples that cannot be ordered."""
    if num_samples < 1:
        raise DataError(f"The dataset has {num_samples} samples, so there is nothing to train on. Give at least one.")
    if num_samples > _MOST_SAMPLES:
        raise DataError(f"The dataset has a length of {num_samples}; at most 2^62 samples are supported.")
