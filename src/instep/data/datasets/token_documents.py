"""Next-token samples that know where documents end: samples of one document each, or windows that tell them apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError, SpecError
from instep.data.dataset import BatchDataset
from instep.data.order import Indices

IGNORE_INDEX = -100
"""Targets that no loss counts, as in torch's cross_entropy."""
_SCAN_TOKENS = 1 << 24


class Documents(BatchDataset):
    """Each document cut into samples of `length` tokens by itself; the last one is padded with 0.

    A batch is `(x, y)`, both int64 (B, length); y is x shifted by one token, and -100 where the document has none.
    """

    is_thread_safe = True

    def __init__(self, tokens: npt.NDArray[Any], ends: Indices, length: int) -> None:
        self._tokens, self._length = np.asarray(tokens), length
        self._starts = np.append(0, ends[:-1])
        self._num_targets = np.maximum(ends - self._starts - 1, 0)
        self._sample_ends = np.cumsum(-(-self._num_targets // length))

    def __len__(self) -> int:
        return int(self._sample_ends[-1])

    @cached_property
    def padding_share(self) -> float:
        """The share of all targets that is padding."""
        return 1 - int(self._num_targets.sum()) / (len(self) * self._length)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these samples."""
        samples, length = indices.numpy(), self._length
        documents = np.searchsorted(self._sample_ends, samples, side="right")
        from_last = self._sample_ends[documents] - samples  # 1: the document's last sample
        num_targets = self._num_targets[documents]
        first = (-(-num_targets // length) - from_last) * length  # in the document
        is_target = np.arange(length) < (num_targets - first)[:, None]
        places = (self._starts[documents] + first)[:, None] + np.arange(length + 1)
        rows = self._tokens[np.minimum(places, len(self._tokens) - 1)].astype(np.int64)
        x, y = np.where(is_target, rows[:, :-1], 0), np.where(is_target, rows[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(x), torch.from_numpy(y)


class DocumentWindows(BatchDataset):
    """Windows across documents: sample i starts at token i * length.

    A batch is `(x, y, document)`, all int64 (B, length); y is -100 where x is the last token of a document, and
    `document` numbers the documents of a row from 0, for a mask of the attention.
    """

    is_thread_safe = True

    def __init__(self, tokens: npt.NDArray[Any], ends: Indices, length: int) -> None:
        self._tokens, self._ends, self._length = np.asarray(tokens), ends, length
        self.sample_tokens = length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return these samples."""
        places = (indices.numpy() * self._length)[:, None] + np.arange(self._length + 1)
        rows = self._tokens[places].astype(np.int64)
        documents = np.searchsorted(self._ends, places, side="right")
        # Contiguous, as a model expects them.
        y = np.where(documents[:, 1:] == documents[:, :-1], rows[:, 1:], IGNORE_INDEX)
        numbers = documents[:, :-1] - documents[:, :1]
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(y), torch.from_numpy(numbers)


def document_ends(
    files: Sequence[Path], tokens: Sequence[npt.NDArray[Any]], documents: Any, eod: int | None
) -> list[Indices]:
    """Return where the documents of each file end, in tokens; the last one at the end of its file."""
    if documents is None:
        assert eod is not None
        return [_find_ends(each, eod) for each in tokens]
    if eod is not None:
        raise SpecError("documents= and eod= both say where documents end. Give one of them.")
    given = documents if isinstance(documents, (list, tuple)) and not _is_numbers(documents) else [documents]
    if len(given) != len(files):
        raise SpecError(
            f"documents= has the ends of {len(given)} files, and there are {len(files)} token files. Give a list with "
            "one array or .npy file for each."
        )
    return [_check_ends(file, len(each), _load(ends)) for file, each, ends in zip(files, tokens, given, strict=True)]


def _is_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, np.integer)) for value in values)


def _find_ends(tokens: npt.NDArray[Any], eod: int) -> Indices:
    """Return where documents end by their last token; a piece at a time, so that a map is not read into memory."""
    pieces = [
        start + 1 + np.flatnonzero(tokens[start : start + _SCAN_TOKENS] == eod)
        for start in range(0, len(tokens), _SCAN_TOKENS)
    ]
    ends = np.concatenate([np.arange(0), *pieces])
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _load(ends: Any) -> npt.NDArray[Any]:
    if not isinstance(ends, (str, os.PathLike)):
        return np.asarray(ends)
    try:
        return np.asarray(np.load(ends, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{os.fspath(ends)} cannot be read as a .npy file of document ends: {error}.") from error


def _check_ends(file: Path, num_tokens: int, ends: npt.NDArray[Any]) -> Indices:
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
        raise DataError(
            f"The document ends of {file} are {ends.dtype} of shape {ends.shape}. Give whole numbers, one a document."
        )
    numbers = ends.astype(np.int64)
    if numbers[0] < 0 or (wrong := np.flatnonzero(np.diff(numbers) < 0)).size:
        at = 0 if numbers[0] < 0 else int(wrong[0]) + 1
        raise DataError(f"Document {at} of {file} ends at token {numbers[at]}, before it begins. Give ascending ends.")
    if numbers[-1] != num_tokens:
        raise DataError(
            f"The last document of {file} ends at token {numbers[-1]}, and the file has {num_tokens}. The ends belong "
            "to another file, or the file is truncated."
        )
    return numbers
