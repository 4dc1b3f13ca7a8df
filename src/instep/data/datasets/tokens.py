"""A memory-mapped file of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from instep.core.errors import DataError, SpecError
from instep.data.datasets.windows import Windows, check_length


def tokens(path: str | Path, length: int, dtype: str = "uint16") -> Windows:
    """Open a file of raw little-endian token ids as next-token samples.

    A batch is `(x, y)`, both int64 (B, length): sample i starts at token i * length, y is x shifted by one
    token. Only the samples of a batch are read from disk.
    """
    path = Path(path)
    item = _item_type(dtype)
    try:
        num_bytes = path.stat().st_size
        if num_bytes % item.itemsize:
            raise DataError(
                f"{path} has {num_bytes} bytes, which is not a multiple of the {item.itemsize} bytes of a token "
                f"({dtype}). Is it truncated, or of another dtype?"
            )
        count = num_bytes // item.itemsize
        check_length(f"{path} holds {count} tokens", count, length)
        return Windows(np.memmap(path, dtype=item, mode="r"), length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _item_type(dtype: str) -> np.dtype[np.generic]:
    known = ("uint8", "uint16", "uint32", "int32", "int64")
    if dtype not in known:
        raise SpecError(f"dtype={dtype!r} is not a dtype of token ids. Choose one of {', '.join(known)}.")
    return np.dtype(dtype).newbyteorder("<")
