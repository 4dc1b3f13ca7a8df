"""Read the data that something is fitted to: arrays as they are, datasets in chunks through their readers.

Ranks: each reads its part; of a stream, which only the stream itself can skip through, every n-th chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError
from instep.data.kinds import open_chunks
from instep.data.loader import LoadOptions, num_samples
from instep.data.ordered import samples_of
from instep.data.readers import Collate, Request, find_reader
from instep.data.statistics.ranks import FitRanks, Reading
from instep.data.stream import is_stream

_CHUNK_ROWS = 1024
_BLOCK_ELEMENTS = 1 << 20
"""Of an array that is read in slices."""


def read_numbers(data: Any, column: int | str | None = None) -> Reading:
    """Return a reading of the data as arrays of numbers, one row per sample."""
    data = _as_array(data)
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return Reading(lambda: _length(data), lambda ranks: _slices(data, ranks))
    batches = Reading(lambda: _num_samples(data, None), lambda ranks: _chunks(data, None, ranks))
    return batches.map(lambda batch: numbers_of(_chosen(batch, column)))


def read_samples(data: Any, column: int | str | None = None) -> Reading:
    """Return a reading of the data as lists of samples."""
    if isinstance(data, str | bytes):
        raise DataError(f"{data!r:.40} is one text. Give a list of texts, or a dataset.")
    samples = Reading(lambda: _num_samples(data, list), lambda ranks: _chunks(data, list, ranks))
    return samples if column is None else samples.map(lambda rows: [row[column] for row in rows])


def numbers_of(block: Any) -> npt.NDArray[Any]:
    """Return a tensor, an array or nested lists as an array of numbers; raise DataError if it holds others."""
    if isinstance(block, torch.Tensor):
        block = block.detach().cpu()
        block = block.float() if block.dtype is torch.bfloat16 else block
    try:
        array = np.asarray(block)
        if array.dtype.kind == "O":
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"The data cannot be read as an array of numbers: {error}.") from None
    if array.dtype.kind not in "biuf":
        raise DataError(f"The data is an array of {array.dtype}, and statistics need numbers. Convert it first.")
    return array.astype(np.float64) if array.dtype.kind == "f" and array.dtype.itemsize > 8 else array


def _as_array(data: Any) -> Any:
    """Return a table, or lists of numbers, as an array; anything else as it is."""
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return data
    if callable(getattr(data, "to_numpy", None)):  # a DataFrame
        return data.to_numpy()
    if isinstance(data, list | tuple) and not any(isinstance(each, (np.ndarray, torch.Tensor)) for each in data[:2]):
        is_table = all(isinstance(each, list | tuple | int | float) or each is None for each in data[:2])
        return numbers_of(data) if is_table and not _has_columns(data) else data
    return data


def _has_columns(data: Any) -> bool:
    """Return whether samples are tuples with tensors or arrays in them, as (x, y)."""
    first = data[0] if len(data) else None
    return isinstance(first, list | tuple) and any(isinstance(each, (np.ndarray, torch.Tensor)) for each in first)


def _length(array: Any) -> int:
    if not array.ndim or not len(array):
        raise DataError(f"The data is empty: its shape is {tuple(array.shape)}. Give at least one row.")
    return len(array)


def _num_samples(data: Any, collate: Collate | None) -> int | None:
    return None if is_stream(data) else num_samples(samples_of(data), collate)


def _slices(array: Any, ranks: FitRanks) -> Iterator[npt.NDArray[Any]]:
    """Yield a rank's rows of an array, a part at a time: one on disk (a memory map) is not read whole."""
    own = ranks.part(_length(array))
    step = max(1, _BLOCK_ELEMENTS // max(1, int(np.prod(array.shape[1:]))))
    for first in range(own.start, own.stop, step):
        yield numbers_of(array[first : min(first + step, own.stop)])


def _chunks(data: Any, collate: Collate | None, ranks: FitRanks) -> Iterator[Any]:
    """Yield a rank's batches of a dataset; what it draws is seeded for each sample, as in training."""
    if is_stream(data):
        options = LoadOptions(rank=ranks.rank, world_size=ranks.world_size, collate=collate, workers=0, seed=0)
        for batch, _ in open_chunks(data, _CHUNK_ROWS, options).read():
            yield batch
        return
    samples = samples_of(data)
    own = ranks.part(num_samples(samples, collate))
    if not own:
        return
    source = LoadOptions(seed=0, local_world_size=ranks.world_size).open_source(
        find_reader(samples, collate, seed=0), samples, max_workers=-(-len(own) // _CHUNK_ROWS)
    )
    starts = range(own.start, own.stop, _CHUNK_ROWS)
    try:
        yield from source.read(Request(0, torch.arange(first, min(first + _CHUNK_ROWS, own.stop))) for first in starts)
    finally:
        source.close()


def _chosen(batch: Any, column: int | str | None) -> Any:
    """Return a column of a batch; the only one, if none is named."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch
    names = list(batch) if isinstance(batch, Mapping) else list(range(len(batch)))
    if column is None and len(names) == 1:
        column = names[0]
    if column not in names:
        asked = "say which column to fit to" if column is None else f"column={column!r} is none of them"
        raise DataError(
            f"A batch of the data has the columns {', '.join(map(repr, names))}: {asked}, for instance "
            f"fit(data, column={names[0]!r})."
        )
    return batch[column]
