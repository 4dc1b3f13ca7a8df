"""The idx format of the MNIST files: a big-endian header, then bytes.

0x00 0x00  type (0x08: unsigned bytes)  number of dimensions  |  one uint32 a dimension  |  the bytes
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError

_CHUNK_BYTES = 1 << 20


def read_idx(path: Path, num_dims: int) -> npt.NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, gzipped if its name says so.

    Anything that is not exactly right is an error.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(path, file, num_dims)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Get it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse(path: Path, file: BinaryIO, num_dims: int) -> npt.NDArray[np.uint8]:
    header_bytes = 4 + 4 * num_dims
    header = file.read(header_bytes)
    magic = bytes([0, 0, 8, num_dims])
    if header[:4] != magic:
        raise DataError(
            f"{path} begins with 0x{header[:4].hex()}, not with 0x{magic.hex()}: it is no idx file of "
            f"unsigned bytes in {num_dims} dimension{'s' if num_dims > 1 else ''}. Is it another file?"
        )
    if len(header) < header_bytes:
        raise DataError(f"{path} ends within its header: {header_bytes} bytes expected, {len(header)} found.")
    shape = struct.unpack(f">{num_dims}I", header[4:])
    expected = math.prod(shape)
    data = _read_at_most(file, expected + 1)
    if len(data) != expected:
        found = f"{len(data)} found" if len(data) < expected else "more found"
        raise DataError(
            f"{path} is {'truncated' if len(data) < expected else 'too long'}: its header says "
            f"{' × '.join(map(str, shape))} = {expected} bytes of data, {found}. Get it again."
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _read_at_most(file: BinaryIO, limit: int) -> bytearray:
    # In pieces: the limit comes from the file, and memory must not be set aside on its word alone.
    data = bytearray()
    while len(data) < limit and (piece := file.read(min(_CHUNK_BYTES, limit - len(data)))):
        data += piece
    return data
