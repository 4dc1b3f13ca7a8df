"""Write safetensors files, hashing the bytes while they are written.

safetensors' own writer first copies everything in memory and holds the GIL meanwhile, so training would stall. The
format is small: the length of the header, a JSON header, the bytes of the tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from instep.checkpoint.manifest import FileEntry
from instep.core.errors import CheckpointError

if TYPE_CHECKING:
    from instep.checkpoint.reader import StoredTensor

_CHUNK_BYTES, _SYNC_BYTES = 4 << 20, 64 << 20
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""torch's dtypes by their safetensors names."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor | StoredTensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write and fsync a .safetensors file; the tensors must be contiguous and on the CPU."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    # The order of safetensors itself: then every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        dtype = dtype_name(tensor.dtype, name)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = (len(text).to_bytes(8, "little"), text)
    return write_synced(path, itertools.chain(head, (_bytes_of(tensor) for _, tensor in ordered)))


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return the safetensors name of a tensor's dtype; raise CheckpointError if there is none."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is of {dtype}, which safetensors cannot store. Convert it to another dtype.")
    return _NAMES[dtype]


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write and fsync a file; return its size and hash."""
    digest, num_bytes, synced = hashlib.sha256(), 0, 0
    with path.open("wb", buffering=1 << 20) as file:
        for data in chunks:
            view = memoryview(data)
            for first in range(0, len(view), _CHUNK_BYTES):
                chunk = view[first : first + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
                num_bytes += len(chunk)
                if num_bytes - synced >= _SYNC_BYTES:  # so that a slow disk shows progress, not one call of minutes
                    file.flush()
                    os.fdatasync(file.fileno())
                    synced = num_bytes
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(num_bytes, digest.hexdigest())


def _bytes_of(tensor: torch.Tensor | StoredTensor) -> memoryview:
    data = tensor if isinstance(tensor, torch.Tensor) else tensor.read()
    return data.reshape(-1).view(torch.uint8).numpy().data
