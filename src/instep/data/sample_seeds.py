"""The randomness of samples: the global generators are seeded for each.

Ranks: all; each seeds its own generators, and those of its worker processes.

[Note: Randomness of a sample]
A dataset that augments draws from the global generators. Which process reads a sample, and after which
others, depends on the world size and the number of workers. So before each sample the generators are
seeded from (seed, epoch, sample), which depends on neither. Only the CPU generators are seeded: a dataset
that draws on a GPU must seed it itself. For the same reason a user's dataset always computes on one thread,
as torch's worker processes do: the rounding of a sum may depend on the number of threads.

To seed the generators of Python and NumPy takes as long as to read a small file, and most datasets draw from torch's
only, or from none. So while nothing draws from those two, they are set once for a batch, to what follows from (seed,
epoch), and looked at afterwards: at the numbers of NumPy's, and at what Python's would draw next, which is known and
would be something else after any draw. If they were drawn from, the batch is read again with all generators seeded
before each sample, and so is every batch from then on. A process reads its first batch with all of them seeded, and
looks after some of its samples: most of the time that tells, and nothing has to be read twice. (What looks at the state
of one of the two without drawing, or puts it back, sees that of the epoch, at any world size.)
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from instep.data.global_generators import numpy_numbers

T = TypeVar("T")
BeginRow = Callable[[int], None]
_NO_SAMPLE = -1
_FIRST_8 = struct.Struct("<Q8x")
_NEXT_BITS = 128
"""Of Python's generator, to see whether it has been drawn from."""
_LOOKED_AT = 16
"""Samples after which a process looks whether they have drawn."""


class _Parked(NamedTuple):
    """What Python's and NumPy's generators are in an epoch while nothing is drawn from them."""

    epoch: int
    numpy_numbers: Any
    next_bits: int
    """What Python's draws next."""


class SampleSeeds:
    """Seeds the generators before each sample of a batch ([Note: Randomness of a sample])."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._seeds_all: bool | None = None
        """Whether Python's and NumPy's generators are seeded, too; None before the first sample was read."""
        self._parked: _Parked | None = None

    def read(self, epoch: int, numbers: list[int], read: Callable[[BeginRow], T]) -> T:
        """Return `read(begin_row)`, which calls `begin_row(i)` before row i draws; `numbers[i]` is the row's sample."""
        if self._seeds_all is None:
            return self._read_first(epoch, numbers, read)
        if self._seeds_all:
            return read(lambda row: seed_sample(self._seed, epoch, numbers[row]))
        parked = self._park(epoch)
        seeds, seed_torch = _torch_seeds(self._seed, epoch, numbers), torch.default_generator.manual_seed

        def begin_row(row: int) -> None:
            seed_torch(seeds[row])

        try:
            batch = read(begin_row)
        except Exception:
            if not _have_drawn(parked):
                raise
        else:
            if not _have_drawn(parked):
                return batch
        self._seeds_all = True
        return self.read(epoch, numbers, read)

    def _read_first(self, epoch: int, numbers: list[int], read: Callable[[BeginRow], T]) -> T:
        """Return a batch, with all generators seeded; find out whether its first samples draw."""
        seeded: Any = None
        num_seeded = 0

        def look() -> None:
            if 0 < num_seeded <= _LOOKED_AT:
                self._seeds_all = self._seeds_all or _states() != seeded

        def begin_row(row: int) -> None:
            nonlocal seeded, num_seeded
            look()
            seed_sample(self._seed, epoch, numbers[row])
            num_seeded += 1
            if num_seeded <= _LOOKED_AT:
                seeded = _states()

        batch = read(begin_row)
        look()
        return batch

    def _park(self, epoch: int) -> _Parked:
        """Set Python's and NumPy's generators to the states of an epoch, and return what shows whether they draw."""
        seed_sample(self._seed, epoch, _NO_SAMPLE)
        if self._parked is None or self._parked.epoch != epoch:
            state = random.getstate()
            self._parked = _Parked(epoch, numpy_numbers(), random.getrandbits(_NEXT_BITS))
            random.setstate(state)
        return self._parked


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators for one sample of one epoch."""
    digest = _digest(_begun_digest(seed, epoch), index)
    _seed_torch(digest)
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[8:12], "little"))


@functools.lru_cache(maxsize=4)
def _begun_digest(seed: int, epoch: int) -> hashlib.blake2b:
    """Return the digest of `seed/epoch/`, which those of all samples begin with."""
    return hashlib.blake2b(f"{seed}/{epoch}/".encode(), digest_size=16, person=b"instep.sample")


def _digest(begun: hashlib.blake2b, index: int) -> bytes:
    own = begun.copy()
    own.update(b"%d" % index)
    return own.digest()


def _torch_seeds(seed: int, epoch: int, numbers: list[int]) -> list[int]:
    """Return what torch's generator is seeded with before each of these samples."""
    begun = _begun_digest(seed, epoch)
    digests = b"".join([_digest(begun, number) for number in numbers])
    return np.frombuffer(digests, "<u8")[::2].tolist()  # type: ignore[no-any-return]


def _seed_torch(digest: bytes) -> None:
    torch.default_generator.manual_seed(_FIRST_8.unpack(digest)[0])


def _have_drawn(parked: _Parked) -> bool:
    """Return whether Python's or NumPy's generator was drawn from, since they were set; draws from Python's."""
    return numpy_numbers() != parked.numpy_numbers or random.getrandbits(_NEXT_BITS) != parked.next_bits


def _states() -> tuple[Any, ...]:
    """Return what changes when somebody draws from Python's or NumPy's generators, after they were seeded."""
    return numpy_numbers(), random.getstate()


def fingerprint() -> tuple[Any, ...]:
    """Return the states of the generators: they differ if something was drawn in between."""
    return torch.get_rng_state().numpy().tobytes(), *_states()
