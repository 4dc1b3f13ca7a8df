"""The source of datasets that are read sample by sample: torch's DataLoader and its worker processes.

Ranks: all; each has its own workers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from instep.data.randomness import generators_kept, seed_sample
from instep.data.source import Collate, Request, Source

_ORPHAN_CHECK_S = 0.5
_MOST_DEFAULT_WORKERS = 8


def default_workers(local_world_size: int) -> int:
    """Return how many processes load samples: this rank's share of the cores, less the one that computes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST_DEFAULT_WORKERS, cores // local_world_size - 1))


class SampleSource(Source):
    """Reads `dataset[index]` for each sample, in worker processes or, if there are none, in this process."""

    def __init__(self, dataset: Any, *, collate: Collate | None, workers: int, seed: int) -> None:
        super().__init__()
        self._reader = _SampleReader(dataset, collate or default_collate, seed)
        self._workers = workers
        self._queue = _RequestQueue()
        self._loader = self._make_loader() if workers else None
        self._batches: Any = None

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

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=self._queue,  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=_unchanged,
            persistent_workers=True,
            worker_init_fn=_end_with_parent,
            # A generator of its own: otherwise each iterator would draw from the global one.
            generator=torch.Generator(),
            # Forked workers need no pickling, so a dataset may be defined anywhere, even in a notebook.
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
        )


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


@dataclass(frozen=True)
class _Failure:
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
        error.__dict__.pop("__notes__", None)
        for note in self.notes:
            error.add_note(note)
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


def _unchanged(batch: Any) -> Any:
    return batch


def _shortened(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, … {len(indices)} in all]"
