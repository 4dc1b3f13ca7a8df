"""A dataset whose samples are computed from those of another, each with randomness of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from instep.data.dataset import BatchDataset


class MappedDataset(BatchDataset):
    """`fn(sample)` of each sample."""

    draws_by_row = True

    def __init__(self, dataset: BatchDataset, fn: Callable[..., Any]) -> None:
        self._dataset, self._fn = dataset, fn
        self._takes_generator = "generator" in inspect.signature(fn).parameters
        self.block_sizes = dataset.block_sizes

    def __len__(self) -> int:
        return len(self._dataset)

    def prefetch(self, blocks: npt.NDArray[np.int64]) -> None:
        """Begin to fetch blocks that will be read soon."""
        self._dataset.prefetch(blocks)

    def share_blocks(self, num_processes: int) -> None:
        """Share decoded blocks with the other processes of this machine."""
        self._dataset.share_blocks(num_processes)

    def rows(self, indices: torch.Tensor, begin_row: Callable[[int], None] | None = None) -> list[Any]:
        """Return `fn` of these samples, one by one."""
        if not self._dataset.draws_by_row:
            samples = self._dataset.rows(indices)
            return [self._compute(sample, row, indices, begin_row) for row, sample in enumerate(samples)]
        # One after the other: `fn` draws on from where the dataset stopped drawing for this row.
        mapped = []
        for row in range(len(indices)):
            begin = None if begin_row is None else partial(_begin_only, begin_row, row)
            sample = self._dataset.rows(indices[row : row + 1], begin)[0]
            mapped.append(self._compute(sample, row, indices, None))
        return mapped

    def _compute(self, sample: Any, row: int, indices: torch.Tensor, begin_row: Callable[[int], None] | None) -> Any:
        if begin_row is not None:
            begin_row(row)
        try:
            # The default generator: it was seeded for this sample.
            return self._fn(sample, generator=torch.default_generator) if self._takes_generator else self._fn(sample)
        except Exception as error:
            error.add_note(f"Raised by the function of map() for sample {int(indices[row])} of the dataset.")
            raise

    def gather(self, indices: torch.Tensor) -> Any:
        """Return `fn` of these samples, stacked."""
        return default_collate(self.rows(indices))


def _begin_only(begin_row: Callable[[int], None], row: int, _only: int) -> None:
    begin_row(row)
