"""The base of datasets that are read a whole batch at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from instep.data.nested import map_tensors


class BatchDataset(ABC):
    """A dataset that gathers a whole batch in one call.

    `gather` gets a 1-D int64 tensor of sample numbers on the CPU and returns the batch: a tensor, or a
    tuple, dict or dataclass of tensors, whose row i is the sample `indices[i]`.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """Read these samples as one batch."""

    def __getitem__(self, index: int) -> Any:
        """Read one sample, for people who want to look at it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return map_tensors(lambda rows: rows[0], self.gather(torch.tensor([index % len(self)])))
