"""Rows that are decoded one by one, when they are asked for: a block in memory is no larger than it is in its file."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from instep.core.errors import DataError
from instep.data.order import Indices
from instep.data.sources.format import BlockRows

BLOCK_BYTES = 1 << 20
"""A block has about as many bytes: the first batch of an epoch needs those of a whole window,"""
BLOCK_SAMPLES = 32
"""unless that are fewer samples than these, among which a window would shuffle too little,"""
MOST_BLOCK_BYTES = 8 << 20
"""up to this size."""
_NUMBERS = (int, float, np.number)


def is_too_large(num_bytes: int, num_samples: int) -> bool:
    """Return whether a block of so many bytes and samples has one sample too many."""
    if num_samples == 1:
        return False
    return num_bytes > (BLOCK_BYTES if num_samples > BLOCK_SAMPLES else MOST_BLOCK_BYTES)


class SampleRows(BlockRows):
    """The rows of a block whose samples are dicts; a subclass decodes one."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    @abstractmethod
    def row(self, number: int) -> dict[str, Any]:
        """Return one sample."""

    def rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return these samples."""
        return [self.row(number) for number in rows.tolist()]

    def gather(self, rows: Indices) -> dict[str, Any]:
        """Return these samples as columns: numbers as a tensor, arrays as a list of tensors, others as a list."""
        samples = self.rows(rows)
        names = samples[0].keys() if samples else ()
        for sample in samples:
            if sample.keys() != names:
                raise DataError(
                    f"Samples of one batch have the names {sorted(names)} and {sorted(sample)}. Make them alike in "
                    "map(), or define collate(samples) in the Task."
                )
        return {name: _column([sample[name] for sample in samples]) for name in names}


def _column(values: list[Any]) -> Any:
    if all(isinstance(value, _NUMBERS) for value in values):
        numbers = np.array(values)
        if numbers.dtype != object:  # integers of more than 64 bits
            return torch.from_numpy(numbers)
    return [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
