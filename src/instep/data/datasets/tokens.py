"""Next-token samples: windows of one long sequence of tokens, for instance of a memory-mapped file of token ids."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError, SpecError
from instep.data.dataset import BatchDataset

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class Windows(BatchDataset):
    """Sample i starts at token i * length; y is x shifted by one token.

    A batch is `(x, y)`, both int64 (B, length). Tokens at the end that do not fill a sample are left out.
    """

    is_thread_safe = True

    def __init__(self, tokens: npt.NDArray[Any], length: int) -> None:
        # A view: the last token of each window is the first of the next. A memory map stays on disk.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these windows."""
        rows = self._windows[indices.numpy()]
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def check_length(source: str, num_tokens: int, length: int) -> None:
    """Raise unless there is at least one sample, which needs one token more than its length, as the last target."""
    if length < 1:
        raise SpecError(f"length={length} is not possible: a sample needs at least 1 token.")
    if num_tokens <= length:
        raise DataError(
            f"{source}; one sample of length {length} needs {length + 1}. Use a longer file or a smaller length."
        )


def tokens(path: str | Path, length: int, dtype: str = "uint16") -> Windows:
    """Open a file of raw little-endian token ids as next-token samples.

    A batch is `(x, y)`, both int64 (B, length): sample i starts at token i * length, y is x shifted by one
    token. Only the samples of a batch are read from disk.
    """
    path = Path(path)
    if dtype not in _DTYPES:
        raise SpecError(f"dtype={dtype!r} is not a dtype of token ids. Choose one of {', '.join(_DTYPES)}.")
    item = np.dtype(dtype).newbyteorder("<")
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
