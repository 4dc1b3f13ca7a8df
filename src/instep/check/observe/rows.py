"""Hash the rows of a batch, whatever its structure: two rows with the same content have the same hash on all ranks.

Ranks: all, also in a DataLoader's workers. Of a large row only a fixed choice of elements is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

MAX_ELEMENTS = 256
"""Elements of a tensor's row that go into its hash."""
_MAX_DEPTH = 6


def hash_rows(batch: Any, num_rows: int = 0) -> list[int]:
    """Return a hash for each row of a batch; empty: rows cannot be told. `num_rows` 0: that of the first tensor."""
    num_rows = num_rows or num_rows_of(batch)
    hashes = [0] * num_rows
    seen = _add(batch, hashes, 0)
    return hashes if seen else []


def hash_tensors(values: Any) -> int:
    """Return one hash of all tensors in a structure, as they are; 0: there is none."""
    result = 0
    for leaf in _tensors(values):
        result = zlib.crc32(repr(tuple(leaf.shape)).encode() + flat_choice(leaf.reshape(1, -1)).tobytes(), result)
    return result


def _add(value: Any, hashes: list[int], depth: int) -> bool:
    """Add a structure to the rows' hashes, and return whether it had anything to add."""
    if isinstance(value, torch.Tensor):
        return _add_rows(value, hashes)
    if depth == _MAX_DEPTH or isinstance(value, str | bytes):
        return False
    parts = _parts(value)
    if len(parts) == len(hashes) and not all(_is_stacked(part, len(hashes)) for part in parts):
        for row, part in enumerate(parts):  # a list with one entry a row: texts, or tensors of different sizes
            hashes[row] = zlib.crc32(_entry(part), hashes[row])
        return bool(parts)
    added = [_add(part, hashes, depth + 1) for part in parts]  # all of them: no any() of a generator
    return any(added)


def _add_rows(tensor: torch.Tensor, hashes: list[int]) -> bool:
    if not _is_stacked(tensor, len(hashes)) or not hashes:
        return False
    for row, values in enumerate(flat_choice(tensor.reshape(len(hashes), -1))):
        hashes[row] = zlib.crc32(values.tobytes(), hashes[row])
    return True


def _is_stacked(value: Any, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and _is_readable(value) and value.dim() > 0 and value.shape[0] == num_rows


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements lie in memory as they are: not sparse, quantized, conjugated or on meta."""
    return (
        tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def flat_choice(rows: torch.Tensor, max_elements: int = MAX_ELEMENTS) -> numpy.ndarray[Any, Any]:
    """Return the elements of each row that are hashed, as bytes that numpy can read."""
    stride = max(1, -(-rows.shape[1] // max_elements))
    elements = rows.detach()[:, ::stride]
    if not elements.numel():
        return numpy.zeros((rows.shape[0], 0))
    chosen = torch.empty(
        elements.shape, dtype=elements.dtype
    )  # contiguous() would keep the strides of an expanded column
    return chosen.copy_(elements).view(torch.uint8).numpy().reshape(rows.shape[0], -1)


def _entry(value: Any) -> bytes:
    if isinstance(value, str | bytes | int | float):
        return repr(value).encode()
    return str(hash_tensors(value)).encode()


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    fields = getattr(value, "__dict__", None)
    return list(fields.values()) if isinstance(fields, dict) else []


def num_rows_of(values: Any) -> int:
    """Return how many rows the first tensor of a structure has; 0: there is none."""
    return next((leaf.shape[0] for leaf in _tensors(values) if leaf.dim()), 0)


def _tensors(value: Any, depth: int = 0) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if _is_readable(value):
            yield value
    elif depth < _MAX_DEPTH and not isinstance(value, str | bytes):
        for part in _parts(value):
            yield from _tensors(part, depth + 1)
