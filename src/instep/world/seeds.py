"""Seeds, derived from (seed, purpose): never from the rank, the clock or the process."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy
import torch


def derive(*parts: int | str) -> int:
    """Hash the parts into 63 bits; unlike a sum, two purposes cannot collide by accident."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def generators_restored(generators: Sequence[torch.Generator] = (torch.default_generator,)) -> Iterator[None]:
    """Leave these generators of torch's, and those of Python and NumPy, as they were before the block."""
    states = [generator.get_state() for generator in generators]
    others = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(others[0])
        numpy.random.set_state(others[1])


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
