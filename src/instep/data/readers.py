"""Readers: how a kind of dataset is read, by the batch or sample by sample.

Ranks: all; who reads a batch, this process or another, a `Source` decides (source.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, default_collate

from instep.core.errors import DataError
from instep.data.columns import as_columns
from instep.data.dataset import BatchDataset, SelectedDataset
from instep.data.digest import shape_of
from instep.data.nested import check_rows, rows_of
from instep.data.sample_seeds import SampleSeeds, fingerprint, seed_sample

Collate = Callable[[list[Any]], Any]
Gather = Callable[[torch.Tensor], Any]


class Request(NamedTuple):
    """The samples of one part, to be read as one batch."""

    epoch: int
    indices: torch.Tensor
    """1-D int64, on the CPU."""
    draws: torch.Tensor | None = None
    """From which numbers each sample's randomness comes; None: from the indices."""

    @property
    def draw_numbers(self) -> list[int]:
        """The numbers from which each sample's randomness comes."""
        return list((self.indices if self.draws is None else self.draws).tolist())


class Reader(ABC):
    """Reads the samples of one part as a batch.

    A subclass implements `read` and `describe`. What it reads may depend on the seed, the epoch and the sample
    indices, never on the rank, the world size, or the process or thread that reads. `find_reader` chooses the reader
    of a dataset; nothing else knows which readers there are.
    """

    is_thread_safe = False
    """Whether several threads may read at the same time; if not, worker processes read ahead."""
    draws: bool | None = True
    """Whether reading changes the global generators; None: not known before the first batch."""
    is_sequential = False
    """Whether only the process that reads knows what comes next: one that has begun to read ahead is kept."""

    num_replaced = 0
    """Bad samples in whose place this process has read others."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What to tell the user once; the first batch may add to it."""

    @abstractmethod
    def read(self, request: Request) -> Any:
        """Return these samples as one batch; may leave the global generators changed."""

    @abstractmethod
    def describe(self) -> str:
        """Return in a few words how the dataset is read."""


def find_reader(dataset: Any, collate: Collate | None, seed: int) -> Reader:
    """Return how to read a dataset: a whole batch at once if possible, else sample by sample."""
    dataset = _selected(dataset)
    if isinstance(dataset, BatchDataset) and dataset.draws_by_row:
        return RowReader(dataset, collate or default_collate, seed)
    gather = find_gather(dataset, collate)
    if gather is None:
        return SampleReader(dataset, collate or default_collate, seed)
    is_thread_safe = collate is None and _is_thread_safe(dataset)
    single = _one_by_one(dataset)
    return WholeBatchReader(
        gather,
        seed=seed,
        collated=collate is not None,
        is_thread_safe=is_thread_safe,
        by_sample=None if single is None else SampleReader(single, collate or default_collate, seed),
    )


def _selected(dataset: Any) -> Any:
    """Return a Subset of a `BatchDataset` as one itself, and anything else unchanged."""
    if type(dataset) is not Subset:
        return dataset
    base = _selected(dataset.dataset)
    return SelectedDataset(base, dataset.indices) if isinstance(base, BatchDataset) else dataset


class _OneByOne:
    """Reads single samples with `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset.__getitems__([index])[0]


def _one_by_one(dataset: Any) -> Any:
    """Return the samples of a dataset that `find_gather` reads with `__getitems__`; None for others."""
    if isinstance(dataset, BatchDataset) or as_columns(dataset, samples_wanted=False) is not None:
        return None
    if type(dataset) is Subset:
        base = _one_by_one(dataset.dataset)
        return None if base is None else Subset(base, dataset.indices)
    return _OneByOne(dataset) if callable(getattr(dataset, "__getitems__", None)) else None


def _is_thread_safe(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    columns = as_columns(dataset, samples_wanted=False)
    return getattr(dataset if columns is None else columns, "is_thread_safe", False) is True


_DRAWS = (
    "The dataset draws random numbers while it reads a whole batch. That noise depends on how the batch is split, so "
    "another number of processes gives other samples. A dataset with only __getitem__ is read sample by sample, each "
    "with its own noise."
)
_DRAWS_BY_SAMPLE = (
    "The dataset draws random numbers while it reads a whole batch: from now on it is read sample by sample, each with "
    "its own noise, which does not depend on how the batch is split."
)


class WholeBatchReader(Reader):
    """Reads a batch in one call."""

    def __init__(
        self,
        gather: Gather,
        *,
        seed: int,
        collated: bool = False,
        is_thread_safe: bool = False,
        by_sample: Reader | None = None,
    ) -> None:
        """`by_sample` reads the same dataset if it turns out to draw, and to give samples rather than batches."""
        super().__init__()
        self.is_thread_safe = is_thread_safe
        self.draws = None
        self._gather = gather
        self._by_sample = by_sample
        self._collated = collated  # a Task's own collate may return any number of rows
        self._seed = seed

    def read(self, request: Request) -> Any:
        """Read a batch; if that draws, from generators seeded for this part: a resumed run repeats its noise."""
        indices = request.indices
        if self.draws is False:
            return self._gather(indices)
        if self.draws and self._by_sample is not None:
            return self._by_sample.read(request)
        seed_sample(self._seed, request.epoch, request.draw_numbers[0])
        before = fingerprint() if self.draws is None else None
        batch = self._gather(indices)
        if before is not None:
            self.draws = fingerprint() != before
            if not self._collated:
                check_rows(batch, len(indices))
            if self.draws:
                return self._read_by_sample(request, batch)
        return batch

    def _read_by_sample(self, request: Request, batch: Any) -> Any:
        """Read sample by sample from now on, if that gives such a batch; say that the dataset draws."""
        single: Any = None
        if self._by_sample is not None:
            with suppress(Exception):  # what it gives is a batch, which has no first sample
                single = self._by_sample.read(request)
        if shape_of(single) != shape_of(batch):
            self._by_sample = None
        self.notices.append(_DRAWS if self._by_sample is None else _DRAWS_BY_SAMPLE)
        return batch if self._by_sample is None else single

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return "indexed by the batch"


def find_gather(dataset: Any, collate: Collate | None) -> Gather | None:
    """Return a function that reads a whole batch at once; None if the dataset must be read sample by sample."""
    columns = as_columns(dataset, samples_wanted=collate is not None)
    owner = dataset if columns is None else columns
    if isinstance(owner, BatchDataset):
        gather = owner.gather
        return gather if collate is None else lambda indices: collate(owner.rows(indices))
    if type(dataset) is Subset:
        # Its own __getitems__ would read samples one by one, and without their seeds.
        base = find_gather(dataset.dataset, collate)
        numbers = torch.from_numpy(np.array(dataset.indices, dtype=np.int64))  # a list of 10^8 would take minutes
        return None if base is None else lambda indices: base(numbers.index_select(0, indices))
    if callable(getattr(dataset, "__getitems__", None)):
        return _from_getitems(dataset, collate)
    return None


def _from_getitems(dataset: Any, collate: Collate | None) -> Gather:
    """Read with `__getitems__`, by torch's convention: a list is samples to collate, anything else is the batch."""

    def gather(indices: torch.Tensor) -> Any:
        batch = dataset.__getitems__(indices.tolist())
        if not isinstance(batch, list):
            return batch if collate is None else collate(rows_of(batch, len(indices)))
        if len(batch) != len(indices):
            raise DataError(
                f"{type(dataset).__name__}.__getitems__ was asked for {len(indices)} samples and returned "
                f"{len(batch)}. Return one for each index, in the order of the indices."
            )
        return (collate or default_collate)(batch)

    return gather


class SampleReader(Reader):
    """Reads `dataset[index]` for each sample, each with its own seed, and collates them."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        super().__init__()
        self._dataset, self._collate, self._seeds = dataset, collate, SampleSeeds(seed)

    def read(self, request: Request) -> Any:
        """Return these samples as one batch; leaves the global generators changed."""
        return self._seeds.read(request.epoch, request.draw_numbers, lambda begin: self._read(request, begin))

    def _read(self, request: Request, begin_row: Callable[[int], None]) -> Any:
        samples, numbers = [], request.indices.tolist()
        for row, index in enumerate(numbers):
            begin_row(row)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"This happened while reading sample {index} of the dataset in epoch {request.epoch}.")
                raise
        return collate_samples(self._collate, samples, numbers)

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return "sample by sample"


class RowReader(Reader):
    """Reads the rows of a `BatchDataset` that draws, each with its own seed, and collates them."""

    def __init__(self, dataset: BatchDataset, collate: Collate, seed: int) -> None:
        super().__init__()
        self._dataset, self._collate, self._seeds = dataset, collate, SampleSeeds(seed)

    def read(self, request: Request) -> Any:
        """Return these samples as one batch; leaves the global generators changed."""
        return self._seeds.read(request.epoch, request.draw_numbers, lambda begin: self._read(request, begin))

    def _read(self, request: Request, begin_row: Callable[[int], None]) -> Any:
        rows = self._dataset.rows(request.indices, begin_row)
        return collate_samples(self._collate, rows, request.indices.tolist())

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return "by rows"


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note to what is raised."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def collate_samples(collate: Collate, samples: list[Any], numbers: list[int]) -> Any:
    """Make a batch of samples; what is raised names them."""
    with noting(
        f"This happened while making a batch of the samples {_shortened(numbers)}. If samples cannot be stacked, "
        "define collate(samples) in the Task."
    ):
        return collate(samples)


def _shortened(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, … {len(indices)} in all]"
