"""Sources: how a dataset is read as batches. The abstract class, and the source that reads whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from instep.core.errors import DataError
from instep.data.columns import as_columns
from instep.data.dataset import BatchDataset
from instep.data.nested import map_tensors
from instep.data.randomness import fingerprint, generators_kept, seed_sample
from instep.world.tensors import nested_tensors

Request = tuple[int, torch.Tensor]
"""The epoch, and the sample indices (1-D int64, on the CPU) of one part."""
Collate = Callable[[list[Any]], Any]
Gather = Callable[[torch.Tensor], Any]


class Source(ABC):
    """Reads the samples of a dataset as batches.

    A subclass implements `read` and `describe`, and `close` if it starts processes or threads. What it reads may depend
    on the seed, the epoch and the sample index, never on the rank or the world size. `LoadOptions.open_source`
    (loader.py) chooses the source of a dataset; nothing else knows which sources there are.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What to tell the user once."""

    @abstractmethod
    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield a batch for each request, in order; requests may be taken ahead. One call at a time."""

    @abstractmethod
    def describe(self) -> str:
        """Return in a few words how the dataset is read."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End background processes and threads."""


class BatchSource(Source):
    """Reads a batch in one call, in this process."""

    def __init__(self, gather: Gather, *, seed: int, collated: bool = False) -> None:
        super().__init__()
        self._gather = gather
        self._collated = collated  # a Task's own collate may return any number of rows
        self._seed = seed
        self._draws: bool | None = None  # whether `gather` draws random numbers; None before the first batch

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Read each batch when it is needed."""
        for epoch, indices in requests:
            yield self._gather(indices) if self._draws is False else self._gather_watched(epoch, indices)

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return "indexed by the batch"

    def _gather_watched(self, epoch: int, indices: torch.Tensor) -> Any:
        """Gather with generators seeded for this part, so that at least a resumed run repeats its noise."""
        with generators_kept():
            seed_sample(self._seed, epoch, int(indices[0]))
            before = fingerprint()
            batch = self._gather(indices)
            if self._draws is None:
                self._draws = fingerprint() != before
                self._check_first(batch, len(indices))
        return batch

    def _check_first(self, batch: Any, expected_rows: int) -> None:
        if not self._collated:
            _check_rows(batch, expected_rows)
        if self._draws:
            self.notices.append(
                "The dataset draws random numbers while it reads a whole batch. That noise depends on how "
                "the batch is split, so another number of processes gives other samples. A dataset with only "
                "__getitem__ is read sample by sample, each with its own noise."
            )


def find_gather(dataset: Any, collate: Collate | None) -> Gather | None:
    """Return a function that reads a whole batch at once; None if the dataset must be read sample by sample."""
    columns = as_columns(dataset, samples_wanted=collate is not None)
    owner = dataset if columns is None else columns
    if isinstance(owner, BatchDataset):
        gather = owner.gather
        return gather if collate is None else lambda indices: collate(_rows(gather(indices), len(indices)))
    if type(dataset) is Subset:
        # Its own __getitems__ would read samples one by one, in this process and without their seeds.
        base = find_gather(dataset.dataset, collate)
        numbers = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        return None if base is None else lambda indices: base(numbers.index_select(0, indices))
    if callable(getattr(dataset, "__getitems__", None)):
        return _from_getitems(dataset, collate)
    return None


def _from_getitems(dataset: Any, collate: Collate | None) -> Gather:
    """Read with `__getitems__`, by torch's convention: a list is samples to collate, anything else is the batch."""

    def gather(indices: torch.Tensor) -> Any:
        batch = dataset.__getitems__(indices.tolist())
        if not isinstance(batch, list):
            return batch if collate is None else collate(_rows(batch, len(indices)))
        if len(batch) != len(indices):
            raise DataError(
                f"{type(dataset).__name__}.__getitems__ was asked for {len(indices)} samples and returned "
                f"{len(batch)}. Return one for each index, in the order of the indices."
            )
        return (collate or default_collate)(batch)

    return gather


def _check_rows(batch: Any, expected: int) -> None:
    # Tensors of different lengths may be a packed batch (values and offsets), which cannot be checked.
    lengths = {tensor.shape[0] for tensor in nested_tensors(batch) if tensor.dim()}
    if len(lengths) == 1 and lengths != {expected}:
        raise DataError(
            f"The dataset was asked for a batch of {expected} samples and returned {lengths.pop()} rows. "
            f"Row i of the batch must be the sample indices[i]."
        )


def _rows(batch: Any, count: int) -> list[Any]:
    _check_rows(batch, count)
    return [map_tensors(lambda rows, row=row: rows[row], batch) for row in range(count)]  # type: ignore[misc]
