"""Next-token samples: windows of one long sequence of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError, SpecError
from instep.data.dataset import BatchDataset


class Windows(BatchDataset):
    """Sample i starts at token i * length; y is x shifted by one token.

    A batch is `(x, y)`, both int64 (B, length). Tokens at the end that do not fill a sample are left out.
    """

    def __init__(self, tokens: npt.NDArray[Any], length: int) -> None:
        count = (len(tokens) - 1) // length
        # A view: the last token of each window is the first of the next. A memory map stays on disk.
        self._windows = np.lib.stride_tricks.as_strided(
            tokens,
            shape=(count, length + 1),
            strides=(length * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )

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
