"""Write tensors in the safetensors format, hashing as they go.

safetensors' own writer makes a copy of everything in memory first and holds the interpreter while it does: training
would stand still for as long. The format is small: the header's length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from instep.checkpoint.layout import FileEntry
from instep.core.errors import CheckpointError

_CHUNK_BYTES, _SYNC_BYTES = 4 << 20, 64 << 20
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""By the names that safetensors has for them."""


class Readable(Protocol):
    """A tensor that is elsewhere, and is read when its turn comes."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def read(self) -> torch.Tensor: ...


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor | Readable], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a .safetensors file through to the disk; the tensors are contiguous and on the CPU."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    # As safetensors itself orders them: then every tensor lies at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        check_dtype(name, tensor.dtype)
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = (len(text).to_bytes(8, "little"), text)
    return write_synced(path, itertools.chain(head, (_bytes_of(tensor) for _, tensor in ordered)))


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse what the format has no name for."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is of {dtype}, which safetensors cannot hold. Keep it in another.")


def name_of_dtype(dtype: torch.dtype) -> str:
    """Give a dtype's name in the format."""
    return _NAMES[dtype]


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file through to the disk; give its size and hash."""
    digest, num_bytes, synced = hashlib.sha256(), 0, 0
    with path.open("wb", buffering=1 << 20) as file:
        for piece in pieces:
            view = memoryview(piece)
            for first in range(0, len(view), _CHUNK_BYTES):
                chunk = view[first : first + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                num_bytes += len(chunk)
                if num_bytes - synced >= _SYNC_BYTES:  # a slow disk is seen to be at work, not for minutes in one call
                    file.flush()
                    os.fdatasync(file.fileno())
                    synced = num_bytes
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(num_bytes, digest.hexdigest())


def _bytes_of(tensor: torch.Tensor | Readable) -> memoryview:
    here = tensor if isinstance(tensor, torch.Tensor) else tensor.read()
    return here.reshape(-1).view(torch.uint8).numpy().data
