"""Sources: how a dataset is read, by the batch or sample by sample.

Samples are read by torch's DataLoader and its worker processes.

Ranks: all; each has its own workers.

[Note: Randomness of a sample]
A dataset that augments draws from the global generators. Which process reads a sample, and after which
others, depends on the world size and the number of workers. So before each sample the generators are
seeded from (seed, epoch, sample), which depends on neither. Only the CPU generators are seeded: a dataset
that draws on a GPU must seed it itself.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from instep.core.errors import DataError
from instep.data.columns import as_columns
from instep.data.dataset import BatchDataset
from instep.data.nested import map_tensors
from instep.world.tensors import nested_tensors

Request = tuple[int, torch.Tensor]
"""The epoch, and the sample indices (1-D int64, on the CPU) of one part."""
Collate = Callable[[list[Any]], Any]
Gather = Callable[[torch.Tensor], Any]
_ORPHAN_CHECK_S = 0.5
_MOST_DEFAULT_WORKERS = 8


class Source(ABC):
    """Reads the samples of a dataset as batches.

    A subclass implements `read` and `describe`, and `close` if it starts processes or threads. What it reads may depend
    on the seed, the epoch and the sample index, never on the rank or the world size. `LoadOptions.open_source`
    (loader.py) chooses the source of a dataset; nothing else knows which sources there are.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What to tell the user once; the first batch may add to it."""

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
                if not self._collated:
                    _check_rows(batch, len(indices))
                if self._draws:
                    self.notices.append(
                        "The dataset draws random numbers while it reads a whole batch. That noise depends on how "
                        "the batch is split, so another number of processes gives other samples. A dataset with only "
                        "__getitem__ is read sample by sample, each with its own noise."
                    )
        return batch


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


def default_workers(local_world_size: int) -> int:
    """Return how many processes load samples: this rank's share of the cores, less the one that computes."""
    cores = len(os.sched_getaffinity(0))
    return max(0, min(_MOST_DEFAULT_WORKERS, cores // local_world_size - 1))


class SampleSource(Source):
    """Reads `dataset[index]` for each sample, in worker processes or, if there are none, in this process."""

    def __init__(self, dataset: Any, *, collate: Collate | None, workers: int, seed: int) -> None:
        super().__init__()
        self._reader = _SampleReader(dataset, collate or default_collate, seed)
        self._workers = workers
        self._queue = _RequestQueue()
        self._loader: DataLoader[Any] | None = None
        self._batches: Any = None
        if workers:
            self._loader = DataLoader(
                self._reader,  # type: ignore[arg-type]
                batch_sampler=self._queue,  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=lambda batch: batch,
                persistent_workers=True,
                worker_init_fn=_end_with_parent,
                # A generator of its own: otherwise each iterator would draw from the global one.
                generator=torch.Generator(),
                # Forked workers need no pickling, so a dataset may be defined anywhere, even in a notebook.
                multiprocessing_context="fork",
            )

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Read batches; worker processes read a few ahead and are reused by the next call."""
        return self._read_here(requests) if self._loader is None else self._read_ahead(self._loader, requests)

    def describe(self) -> str:
        """Return in a few words how the dataset is read."""
        return f"sample by sample, {self._workers} worker process{'' if self._workers == 1 else 'es'}"

    def close(self) -> None:
        """End the worker processes."""
        # Otherwise they would end with the last reference, which a traceback may hold for a long time.
        if self._batches is not None:
            self._batches._shutdown_workers()
        self._batches = self._loader = None

    def _read_here(self, requests: Iterable[Request]) -> Iterator[Any]:
        for epoch, indices in requests:
            with generators_kept():
                batch = self._reader.read(epoch, indices.tolist())
            yield batch

    def _read_ahead(self, loader: DataLoader[Any], requests: Iterable[Request]) -> Iterator[Any]:
        self._queue.requests = requests
        with warnings.catch_warnings():
            # Python warns of any fork in a process with threads. These workers are safe: they compute on one
            # thread and do not use the process groups.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            self._batches = iter(loader)
        for batch in self._batches:
            if isinstance(batch, _Failure):
                self.close()
                raise batch.exception()
            yield batch


class _SampleReader:
    """Reads and collates the samples of one part. Worker processes call `__getitems__`."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitems__(self, request: tuple[int, list[int]]) -> Any:
        try:
            return self.read(*request)
        except Exception as error:  # noqa: BLE001 - the parent raises it again
            return _Failure.of(error)

    def read(self, epoch: int, indices: list[int]) -> Any:
        """Read these samples as one batch, each with its own seed. Leaves the global generators changed."""
        samples = []
        for index in indices:
            seed_sample(self._seed, epoch, index)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"This happened while reading sample {index} of the dataset in epoch {epoch}.")
                raise
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(
                f"This happened while making a batch of the samples {_shortened(indices)}. If samples cannot be "
                f"stacked, define collate(samples) in the Task."
            )
            raise


class _Failure(NamedTuple):
    """An exception of a worker process, pickled for its parent.

    torch itself would raise another exception, with the traceback as its message.
    """

    pickled: bytes
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        trace = "".join(traceback.format_exception(error))
        notes = (*getattr(error, "__notes__", ()), f"The traceback in the worker process {os.getpid()}:\n{trace}")
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301 - many exceptions can be pickled but not unpickled
        except Exception:  # noqa: BLE001 - whatever pickling raises, the failure must arrive
            pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(pickled, notes)

    def exception(self) -> Exception:
        """Rebuild the exception."""
        error: Exception = pickle.loads(self.pickled)  # noqa: S301 - pickled by our own worker
        error.__notes__ = list(self.notes)
        return error


class _RequestQueue:
    """The DataLoader's batch sampler: `requests` changes, so one DataLoader and its workers serve every `read`."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return ((epoch, indices.tolist()) for epoch, indices in self.requests)


def _end_with_parent(_worker: int) -> None:
    """End this worker when its parent ends, for whatever reason, and not earlier.

    A scheduler that stops a job may signal every process of it, but a rank that saves still needs its samples.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_ORPHAN_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _shortened(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, … {len(indices)} in all]"


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators for one sample of one epoch."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16, person=b"instep.sample").digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[8:12], "little"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators on exit."""
    state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def fingerprint() -> tuple[bytes, ...]:
    """Return the states of the generators: they differ if something was drawn in between."""
    _, keys, position, has_gauss, _ = np.random.get_state(legacy=True)
    numpy_state = repr((position, has_gauss)).encode() + np.asarray(keys).tobytes()
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), numpy_state
