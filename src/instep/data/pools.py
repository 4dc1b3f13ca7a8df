"""Pools: threads or processes that read batches ahead of the training.

Ranks: all; each has its own.
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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from instep.data.nested import map_tensors
from instep.data.readers import Reader, Request

_PlainRequest = tuple[int, npt.NDArray[Any], npt.NDArray[Any] | None]
READ_AHEAD = 2
"""Batches that each thread or process of a pool reads ahead."""
_ORPHAN_CHECK_S = 0.5


class TimedBatch(NamedTuple):
    """A batch, and how long it took to read."""

    batch: Any
    read_s: float
    cpu_s: float
    """Of these, how long a core was busy: the rest was waiting, for a disk or a network."""
    num_replaced: int = 0
    """Bad samples in whose place a worker process has read others."""


def read_timed(reader: Reader, request: Request, pins: bool = False) -> TimedBatch:
    """Read a batch; `pins`: into pinned memory, from which a GPU copies by itself."""
    begun, cpu_begun = time.perf_counter(), time.thread_time()
    batch = reader.read(request)
    if pins:
        batch = map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch)
    return TimedBatch(batch, time.perf_counter() - begun, time.thread_time() - cpu_begun)


class Pool(ABC):
    """Reads batches ahead, several at a time."""

    def __init__(self, reader: Reader, size: int, timeout_s: float = 0.0, pins: bool = False) -> None:
        """`timeout_s`: how long a batch may take before it is an error; 0 for any time.

        `pins`: batches are handed over in pinned memory; a thread of the pool copies them there.
        """
        self._reader, self._size, self._timeout_s, self._pins = reader, size, timeout_s, pins
        self._num_asked = self._num_ready = 0

    @classmethod
    @abstractmethod
    def describe(cls, size: int) -> str:
        """Return in a few words who reads; of size 0, the training process."""

    @abstractmethod
    def read(self, requests: Iterable[Request]) -> Iterator[TimedBatch]:
        """Yield a batch for each request, in order; a few requests are taken ahead. One call at a time."""

    @abstractmethod
    def close(self, at_once: bool = False) -> None:
        """End the threads or processes; `at_once`: even if they do not answer."""

    def take_depth(self) -> float | None:
        """Return how many batches were ready when one was asked for, on average since the last call; None: none was."""
        asked, ready, self._num_asked, self._num_ready = self._num_asked, self._num_ready, 0, 0
        return ready / asked if asked else None

    def _ask(self, num_ready: int) -> None:
        """Count a batch that is asked for now."""
        self._num_asked += 1
        self._num_ready += num_ready


class ThreadPool(Pool):
    """Threads, for readers that several threads may call."""

    def __init__(self, reader: Reader, size: int, timeout_s: float = 0.0, pins: bool = False) -> None:
        super().__init__(reader, size, timeout_s, pins)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="read-ahead")
        self._pending: deque[Future[TimedBatch]] = deque()

    @classmethod
    def describe(cls, size: int) -> str:
        """Return in a few words who reads."""
        return _described(size, "thread", "threads")

    def read(self, requests: Iterable[Request]) -> Iterator[TimedBatch]:
        """Yield a batch for each request, in order."""
        pending = self._pending
        self._drop_pending()  # of an earlier reading that was left in the middle
        for request in requests:
            pending.append(self._threads.submit(read_timed, self._reader, request, self._pins))
            if len(pending) > READ_AHEAD * self._size:
                yield self._next()
        while pending:
            yield self._next()

    def _next(self) -> TimedBatch:
        self._ask(sum([future.done() for future in self._pending]))
        return self._pending.popleft().result()

    def close(self, at_once: bool = False) -> None:
        """End the threads, after what they read now."""
        del at_once
        self._drop_pending()
        self._threads.shutdown()

    def _drop_pending(self) -> None:
        while self._pending:
            self._pending.popleft().cancel()


class ProcessPool(Pool):
    """The worker processes of torch's DataLoader."""

    def __init__(self, reader: Reader, size: int, timeout_s: float = 0.0, pins: bool = False) -> None:
        super().__init__(reader, size, timeout_s, pins)
        self._queue = _RequestQueue()
        self._batches: Any = None
        with _quiet():
            self._loader: DataLoader[Any] | None = DataLoader(
                _WorkerReader(reader),  # type: ignore[arg-type]
                batch_sampler=self._queue,  # type: ignore[arg-type]
                num_workers=size,
                prefetch_factor=READ_AHEAD,
                timeout=self._timeout_s,
                collate_fn=lambda batch: batch,
                pin_memory=self._pins,
                persistent_workers=True,
                worker_init_fn=_end_with_parent,
                # A generator of its own: otherwise each iterator would draw from the global one.
                generator=torch.Generator(),
                # Forked workers need no pickling, so a dataset may be defined anywhere, even in a notebook.
                multiprocessing_context="fork",
            )

    @classmethod
    def describe(cls, size: int) -> str:
        """Return in a few words who reads."""
        return _described(size, "worker process", "worker processes")

    def read(self, requests: Iterable[Request]) -> Iterator[TimedBatch]:
        """Yield a batch for each request, in order; the next call has the same processes."""
        assert self._loader is not None
        self._queue.requests = requests
        with _quiet():
            self._batches = iter(self._loader)
        if self._timeout_s:
            self._leave_deaths_to_the_timeout()
        while True:
            self._ask(self._batches._data_queue.qsize())
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            if isinstance(batch, _Failure):
                self.close()
                raise batch.exception()
            yield batch

    def close(self, at_once: bool = False) -> None:
        """End the worker processes."""
        # Otherwise they would end with the last reference, which a traceback may hold for a long time.
        if (batches := self._batches) is not None:
            if at_once:
                self._leave_deaths_to_the_timeout()
                for worker in batches._workers:
                    worker.kill()
            batches._shutdown_workers()
        self._batches = self._loader = None

    def _leave_deaths_to_the_timeout(self) -> None:
        """Keep torch's handler of SIGCHLD from raising for a worker's death, in whatever the main thread does then."""
        if self._batches._worker_pids_set:
            signal_handling._remove_worker_pids(id(self._batches))  # type: ignore[attr-defined]
            self._batches._worker_pids_set = False


def _described(size: int, singular: str, plural: str) -> str:
    return f"ahead by {size} {singular if size == 1 else plural}" if size else "in the training process"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress two warnings.

    Python warns of any fork in a process with threads; these workers are safe: they compute on one thread and do not
    use the process groups. torch warns of more workers than cores; those that wait for a disk or a network use none.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*This DataLoader will create", UserWarning)
        yield


class _WorkerReader:
    """Reads in a worker process, which calls `__getitems__`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitems__(self, request: _PlainRequest) -> Any:
        epoch, indices, draws = request
        try:
            draw_numbers = None if draws is None else torch.from_numpy(draws)
            replaced = self._reader.num_replaced
            timed = read_timed(self._reader, Request(epoch, torch.from_numpy(indices), draw_numbers))
            return timed._replace(num_replaced=self._reader.num_replaced - replaced)
        except Exception as error:  # noqa: BLE001 - the parent raises it again
            return _Failure.of(error)


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

    def __iter__(self) -> Iterator[_PlainRequest]:
        # Arrays: a tensor would travel through shared memory.
        for epoch, indices, draws in self.requests:
            yield epoch, indices.numpy(), None if draws is None else draws.numpy()


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
