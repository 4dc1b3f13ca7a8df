"""Fingerprints of tensors, to be compared across ranks. Large tensors are sampled at a fixed stride.

Ranks: all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

_SAMPLED = 4096
"""Elements of a tensor that are looked at."""


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a fingerprint of tensors' values, in their order; those without values (meta) count by shape."""
    crc = 0
    with torch.no_grad():
        for tensor in tensors:
            crc = zlib.crc32(_sample(tensor), crc)
    return crc


def shapes_digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a fingerprint of tensors' shapes, in their order."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def _sample(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return repr(tuple(tensor.shape)).encode()
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous()
    return sample.view(torch.uint8).numpy().tobytes()
