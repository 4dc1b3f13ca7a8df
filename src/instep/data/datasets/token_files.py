"""Next-token samples of several files, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from instep.data.dataset import BatchDataset


class TokenFiles(BatchDataset):
    """The samples of several datasets whose batches are tuples of int64 tensors (B, length)."""

    is_thread_safe = True

    def __init__(self, parts: Sequence[BatchDataset]) -> None:
        self._parts, self.sample_tokens = parts, parts[0].sample_tokens
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return these samples."""
        places = np.searchsorted(self._ends, indices.numpy(), side="right")
        batch: tuple[torch.Tensor, ...] | None = None
        for number in np.unique(places).tolist():
            part = self._parts[number]
            here = torch.from_numpy(np.flatnonzero(places == number))
            rows: Any = part.gather(indices[here] - (int(self._ends[number]) - len(part)))
            if batch is None:
                batch = tuple(column.new_empty((len(indices), *column.shape[1:])) for column in rows)
            for column, values in zip(batch, rows, strict=True):
                column[here] = values
        assert batch is not None, "a batch without samples"
        return batch
