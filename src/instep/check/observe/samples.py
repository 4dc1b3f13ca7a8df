"""Elements of tensors at a fixed stride, and fingerprints: enough to compare ranks, cheap enough for every step.

Ranks: all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NUM_ELEMENTS = 64
"""Elements that are looked at in each tensor, in every step."""
_NUM_DIGESTED = 4096
"""Elements of each tensor that go into a digest, which is taken once."""


@dataclass(frozen=True)
class Samples:
    """Elements of several tensors; a tensor that has none (None, sparse, a shard) has an empty part."""

    parts: tuple[np.ndarray, ...]

    @property
    def hashes(self) -> list[int]:
        """A hash of each part; -1: it is empty."""
        return [zlib.crc32(part.tobytes()) if part.size else -1 for part in self.parts]

    @property
    def norms(self) -> list[float]:
        """The norm of each part."""
        return [float(np.linalg.norm(part.astype(np.float64))) for part in self.parts]

    @property
    def are_zero(self) -> bool:
        """Whether no element differs from zero."""
        return not any(part.any() for part in self.parts)

    def some(self, num_parts: int = 8, num_elements: int = 16) -> list[float]:
        """Return a few elements of a few parts, as numbers to write down."""
        stride = max(1, len(self.parts) // num_parts)
        return [float(value) for part in self.parts[::stride] for value in part[:num_elements]]


def take_samples(tensors: Sequence[torch.Tensor | None]) -> Samples:
    """Return elements of each tensor; all of them come to the host in one copy for each device."""
    chosen: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            if tensor is not None and is_plain(tensor):
                plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                chosen[index] = _few(plain, NUM_ELEMENTS).to(torch.float32)
    parts = [np.empty(0, np.float32)] * len(tensors)
    for device in {tensor.device for tensor in chosen.values()}:
        here = {index: tensor for index, tensor in chosen.items() if tensor.device == device}
        together = torch.cat(list(here.values())).numpy(force=True)
        ends = np.cumsum([tensor.numel() for tensor in here.values()])
        for index, part in zip(here, np.split(together, ends[:-1]), strict=True):
            parts[index] = part
    return Samples(tuple(parts))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values of its own here: dense, on a device, and not a part of a distributed one."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > 0
    )


def local_part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the part of a distributed tensor that this rank holds; any other tensor as it is."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, torch.Tensor) else None


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a fingerprint of tensors' values, in their order; those without values (meta) count by shape."""
    crc = 0
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
                crc = zlib.crc32(repr(tuple(tensor.shape)).encode(), crc)
            else:
                sample = _few(tensor, _NUM_DIGESTED).cpu().contiguous()
                crc = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), crc)
    return crc


def shapes_digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a fingerprint of tensors' shapes, in their order."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def _few(tensor: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return elements of a tensor at a fixed stride, at most so many."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // num_elements)][:num_elements]
