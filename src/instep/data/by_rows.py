"""Any dataset with an index as a `BatchDataset`: read by the batch where that is possible, else sample by sample.

For datasets that are made of others: they read those without a reader of their own, and each row keeps its randomness
([Note: Randomness of a sample]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from instep.data.columns import as_columns
from instep.data.dataset import BatchDataset, SelectedDataset
from instep.data.nested import rows_of

BeginRow = Callable[[int], None]


def by_rows(dataset: Any) -> BatchDataset:
    """Return a dataset as a BatchDataset."""
    columns = as_columns(dataset, samples_wanted=False)
    if columns is not None:
        return columns
    if isinstance(dataset, BatchDataset):
        return dataset
    if type(dataset) is Subset:
        return SelectedDataset(by_rows(dataset.dataset), dataset.indices)
    return _SingleSamples(dataset)


class _SingleSamples(BatchDataset):
    """A dataset that may draw whenever a sample is read."""

    draws_by_row = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._reads_many = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: torch.Tensor) -> Any:
        return default_collate(self.rows(indices))

    def rows(self, indices: torch.Tensor, begin_row: BeginRow | None = None) -> list[Any]:
        samples = []
        for row, index in enumerate(indices.tolist()):
            if begin_row is not None:
                begin_row(row)
            try:
                samples.append(self._read(index))
            except Exception as error:
                error.add_note(f"This happened while reading sample {index} of {type(self._dataset).__name__}.")
                raise
        return samples

    def _read(self, index: int) -> Any:
        if not self._reads_many:
            return self._dataset[index]
        batch = self._dataset.__getitems__([index])
        return batch[0] if isinstance(batch, list) else rows_of(batch, 1)[0]


def read_rows(
    datasets: list[BatchDataset], numbers: list[int], indices: torch.Tensor, begin_row: BeginRow | None
) -> list[Any]:
    """Return one sample for each entry: that of this index of the dataset of this number.

    Datasets that do not draw are read by the batch, the others row after row.
    """
    rows: list[Any] = [None] * len(numbers)
    for number in sorted(set(numbers)):
        dataset, here = datasets[number], [row for row, other in enumerate(numbers) if other == number]
        begin = None if begin_row is None else _begin_at(begin_row, here)
        for row, sample in zip(here, dataset.rows(indices[here], begin), strict=True):
            rows[row] = sample
    return rows


def _begin_at(begin_row: BeginRow, rows: list[int]) -> BeginRow:
    return lambda row: begin_row(rows[row])
