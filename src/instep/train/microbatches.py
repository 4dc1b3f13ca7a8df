"""A part's batch, cut by rows into the micro-batches of a pipeline."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from instep.core.errors import TaskError
from instep.core.microbatches import cut
from instep.data.nested import map_tensors, tensors


def cut_batch(batch: Any, num_rows: int, count: int) -> list[tuple[int, int, Any]]:
    """Cut a nested batch by rows; return each piece's first row, its number of rows, and the piece.

    Tensors with `num_rows` entries in their first dimension are cut. All else (a number, a mask that all rows share)
    is the same in all pieces.
    """
    if not any(tensor.dim() and tensor.shape[0] == num_rows for tensor in tensors(batch)):
        raise TaskError(
            f"a pipeline cuts a batch by its rows, and this one of {num_rows} samples has no tensor with {num_rows} "
            "entries in its first dimension. Let collate put the samples there."
        )
    pairs = itertools.pairwise(cut(num_rows, count))
    return [(first, last - first, _rows(batch, num_rows, first, last)) for first, last in pairs]


def _rows(batch: Any, num_rows: int, first: int, last: int) -> Any:
    def slice_(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first:last] if tensor.dim() and tensor.shape[0] == num_rows else tensor

    return map_tensors(slice_, _slice_lists(batch, num_rows, first, last))


def _slice_lists(batch: Any, num_rows: int, first: int, last: int) -> Any:
    """Cut lists of texts, which collating leaves as one entry for each row."""
    if isinstance(batch, dict):
        return type(batch)({key: _slice_lists(item, num_rows, first, last) for key, item in batch.items()})
    if type(batch) in (tuple, list):
        if len(batch) == num_rows and batch and all(isinstance(item, str | bytes) for item in batch):
            return batch[first:last]
        return type(batch)(_slice_lists(item, num_rows, first, last) for item in batch)
    return batch
