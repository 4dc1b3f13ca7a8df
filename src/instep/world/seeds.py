"""Seeds, derived from (seed, purpose): never from the rank, the clock or the process."""

import hashlib
import random

import numpy
import torch


def derive(*parts: int | str) -> int:
    """Hash the parts into 63 bits; unlike a sum, two purposes cannot collide by accident."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
