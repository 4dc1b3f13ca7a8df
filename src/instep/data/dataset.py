"""The base class of datasets that are read a whole batch at a time, and the splits of those that come with instep."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch

from instep.core.errors import SpecError
from instep.data.nested import map_tensors

Split = Literal["train", "test"]


class BatchDataset(ABC):
    """A dataset that reads a whole batch in one call.

    A subclass implements `__len__`, the number of samples, and `gather`. Nothing else has to change to train on it.
    A dataset that comes with instep also has a function of its file's name in `data/datasets/`, which is listed in
    `data/__init__.py`.

    `gather` gets a 1-D int64 tensor of sample indices on the CPU and returns the batch: a tensor, or a tuple, dict or
    dataclass of tensors, whose row i is the sample `indices[i]`. It may be called with any indices in any order, and
    must return the same sample for the same index. Batches are read ahead by threads if `is_thread_safe` says that
    several may call `gather` at the same time, and otherwise by processes; only if reading takes a noticeable share of
    a step.
    """

    is_thread_safe: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """Return these samples as one batch."""

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample, for people who want to look at it; for a slice, a dataset of these samples."""
        if isinstance(index, slice):
            return _Slice(self, range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return map_tensors(lambda rows: rows[0], self.gather(torch.tensor([index % len(self)])))


class _Slice(BatchDataset):
    """Some samples of a dataset."""

    def __init__(self, dataset: BatchDataset, indices: range) -> None:
        self._dataset, self._indices = dataset, indices
        self.is_thread_safe = dataset.is_thread_safe

    def __len__(self) -> int:
        return len(self._indices)

    def gather(self, indices: torch.Tensor) -> Any:
        return self._dataset.gather(indices * self._indices.step + self._indices.start)


def check_split(split: str) -> None:
    """Raise SpecError unless the split is train or test."""
    if split not in ("train", "test"):
        raise SpecError(f"split={split!r} is unknown. Choose 'train' or 'test'.")
