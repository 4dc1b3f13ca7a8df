"""Seed the global random generators (torch, random, NumPy) for a sample, and restore them.

Ranks: all, and the worker processes that load samples.

[Note: Randomness of a sample]
A dataset that augments draws from the global generators. Which process reads a sample, and after which
others, depends on the world size and the number of workers. So before each sample the generators are
seeded from (seed, epoch, sample), which depends on neither. Only the CPU generators are seeded: a dataset
that draws on a GPU must seed it itself.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators for one sample of one epoch."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16, person=b"instep.sample").digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[8:12], "little"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators on exit."""
    state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def fingerprint() -> tuple[bytes, ...]:
    """Return the states of the generators: they differ if something was drawn in between."""
    _, keys, position, has_gauss, _ = np.random.get_state(legacy=True)
    numpy_state = repr((position, has_gauss)).encode() + np.asarray(keys).tobytes()
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), numpy_state
