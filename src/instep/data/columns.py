"""Tensors and NumPy arrays, alone or side by side, read a whole batch at a time."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from instep.core.errors import DataError
from instep.data.dataset import BatchDataset

Column = torch.Tensor | npt.NDArray[Any]


class Columns(BatchDataset):
    """A tensor or array, or a tuple, list or dict of them: row i of each belongs to sample i.

    Batches have the same structure, with tensors; of a memory map only the rows of a batch are read.
    """

    is_thread_safe = True

    def __init__(self, data: Any) -> None:
        self._names = list(data) if isinstance(data, Mapping) else None
        self._container = tuple if isinstance(data, tuple) else list
        self._single = isinstance(data, (torch.Tensor, np.ndarray))
        columns = [data] if self._single else list(data.values() if self._names is not None else data)
        names = self._names if self._names is not None else range(len(columns))
        self._length = _common_length(names, columns)
        self._readers = [_reader(name, column) for name, column in zip(names, columns, strict=True)]

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: torch.Tensor) -> Any:
        """Return these rows of every column."""
        rows = [read(indices) for read in self._readers]
        if self._single:
            return rows[0]
        return dict(zip(self._names, rows, strict=True)) if self._names is not None else self._container(rows)


def as_columns(dataset: Any, samples_wanted: bool) -> Columns | None:
    """Return a dataset as Columns, or None if it is none; `samples_wanted`: a `collate` needs single samples."""
    if isinstance(dataset, (torch.Tensor, np.ndarray)):
        return Columns(dataset)
    if type(dataset) is TensorDataset:
        return Columns(tuple(dataset.tensors))
    # A list of tensors may be columns or samples. With a collate it can only mean samples. More entries than
    # rows are hardly columns (a thousand images of 3 channels). Otherwise a list is treated as a tuple.
    if not isinstance(dataset, Mapping | tuple | list) or (isinstance(dataset, list) and samples_wanted):
        return None
    columns = list(dataset.values() if isinstance(dataset, Mapping) else dataset)
    if not columns or not all(isinstance(column, (torch.Tensor, np.ndarray)) for column in columns):
        return None
    if isinstance(dataset, list) and len(columns) > max(len(column) if column.ndim else 0 for column in columns):
        return None
    return Columns(dataset)


def _common_length(names: Sequence[Any], columns: Sequence[Column]) -> int:
    for name, column in zip(names, columns, strict=True):
        if column.ndim == 0:
            raise DataError(f"Column {name!r} of the dataset is a scalar, without rows. Give one row per sample.")
        if len(column) != len(columns[0]):
            raise DataError(
                f"Column {names[0]!r} of the dataset has {len(columns[0])} rows and column {name!r} has "
                f"{len(column)}. Row i of each is one sample, so they must have the same length: remove the extra "
                f"rows, or, if these are samples rather than columns, define collate in the Task."
            )
    return len(columns[0])


def _reader(name: Any, column: Column) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reads rows of a column."""
    if isinstance(column, torch.Tensor):
        return _tensor_reader(column.detach())
    try:
        torch.from_numpy(np.empty(0, dtype=column.dtype.newbyteorder("=")))
    except TypeError:
        raise DataError(
            f"Column {name!r} of the dataset is a NumPy array of {column.dtype}, for which torch has no dtype. "
            f"Convert it to numbers first."
        ) from None
    # torch shares only writable memory: read-only memory maps are read through NumPy.
    if column.flags.writeable and column.dtype.isnative:
        with contextlib.suppress(ValueError):  # strides that torch does not support, for instance negative ones
            return _tensor_reader(torch.from_numpy(column))

    def read(indices: torch.Tensor) -> torch.Tensor:
        rows = np.asarray(column.take(indices.numpy(), axis=0))
        return torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=False))

    return read


def _tensor_reader(column: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    # Not column[indices], which takes 5 times as long for rows of bytes.
    if column.device.type == "cpu":
        return lambda indices: column.index_select(0, indices)
    return lambda indices: column.index_select(0, indices.to(column.device))
