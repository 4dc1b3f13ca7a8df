"""The base class of datasets that are read a whole batch at a time, and the splits of those that come with instep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import SpecError
from instep.data.nested import map_tensors, rows_of
from instep.data.orders.blocks import sizes_within

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
    block_sizes: npt.NDArray[np.int64] | None = None
    """The number of samples in each block, where reading one sample reads its whole block; None: there are no blocks.

    Block b holds the samples after those of block b - 1. The order then shuffles blocks, and samples within a window of
    blocks ([Note: Shuffling blocks]).
    """
    sample_tokens: int | None = None
    """The tokens of a sample, where each has as many; None: samples are no sequences, or differ in length."""
    draws_by_row: bool = False
    """Whether `rows` computes each sample with randomness of its own, after it called `begin_row`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """Return these samples as one batch."""

    def rows(self, indices: torch.Tensor, begin_row: Callable[[int], None] | None = None) -> list[Any]:
        """Return these samples one by one, for a `collate`; `begin_row(i)` is called before row i draws, to seed it."""
        del begin_row
        return rows_of(self.gather(indices), len(indices))

    def prefetch(self, blocks: npt.NDArray[np.int64]) -> None:
        """Begin to fetch blocks that will be read soon, without waiting for them; called by the training process."""
        del blocks

    def share_blocks(self, num_processes: int) -> None:
        """Share what is decoded with the other processes of this machine that read the same, of so many in all.

        Called by the training process, before worker processes are forked.
        """
        del num_processes

    def map(self, fn: Callable[..., Any]) -> BatchDataset:
        """Return the dataset of `fn(sample)` of each sample.

        `fn` may draw from the global generators of torch, Python and NumPy, which are seeded for each sample. If it has
        an argument called `generator`, it gets a torch.Generator that is seeded for the sample.
        """
        from instep.data.mapped import MappedDataset

        return MappedDataset(self, fn)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample, for people who want to look at it; for a slice, a dataset of these samples."""
        if isinstance(index, slice):
            return SelectedDataset(self, np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return map_tensors(lambda rows: rows[0], self.gather(torch.tensor([index % len(self)])))


class SelectedDataset(BatchDataset):
    """Some samples of a dataset."""

    def __init__(self, dataset: BatchDataset, indices: npt.ArrayLike) -> None:
        self._dataset, chosen = dataset, np.array(indices, dtype=np.int64)
        self._indices = torch.from_numpy(chosen)
        self.is_thread_safe, self.draws_by_row = dataset.is_thread_safe, dataset.draws_by_row
        self.sample_tokens = dataset.sample_tokens
        if dataset.block_sizes is not None:
            self.block_sizes = sizes_within(dataset.block_sizes, chosen)

    def __len__(self) -> int:
        return len(self._indices)

    def gather(self, indices: torch.Tensor) -> Any:
        return self._dataset.gather(self._indices.index_select(0, indices))

    def rows(self, indices: torch.Tensor, begin_row: Callable[[int], None] | None = None) -> list[Any]:
        return self._dataset.rows(self._indices.index_select(0, indices), begin_row)

    def prefetch(self, blocks: npt.NDArray[np.int64]) -> None:
        self._dataset.prefetch(blocks)

    def share_blocks(self, num_processes: int) -> None:
        self._dataset.share_blocks(num_processes)


def check_split(split: str) -> None:
    """Raise SpecError unless the split is train or test."""
    if split not in ("train", "test"):
        raise SpecError(f"split={split!r} is unknown. Choose 'train' or 'test'.")
