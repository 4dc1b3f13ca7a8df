"""A source: the batches of a dataset, one after the other, read here or ahead ([Note: Input that keeps up]).

Ranks: all; each has its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from instep.data.input_pace import Change, InputPace, Limits, Window
from instep.data.pools import READ_AHEAD, Pool, ProcessPool, Request, ThreadPool, TimedBatch, read_timed
from instep.data.readers import Reader, generators_kept
from instep.world.tensors import nested_tensors

_WINDOW_S = 0.5
"""How long to measure before a decision."""
_WINDOW_BATCHES = 8
"""And over how many batches, unless they take longer than that to read."""
_FIRST_BATCHES = 2
"""Not counted at the beginning: the first steps take longer, and so may the first batches."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch's worker processes put batches


@dataclass(frozen=True)
class ReaderLimits:
    """What the readers of a source may use."""

    fixed: int | None = None
    """Their number, if a person has chosen it: 0 reads in the training process."""
    most: int | None = None
    """Not more than there are batches, if they are few."""
    cores: float = 1.0
    """This rank's share of the node's cores."""
    compute_threads: int = 1
    """Of these, how many compute steps."""
    local_world_size: int = 1
    """Ranks of this node, which share its memory."""


class InputChange(NamedTuple):
    """A decision of who reads from now on, and what it was made from."""

    change: Change
    window: Window
    readers: str
    """In words."""


class Source:
    """Reads the batches of one dataset. `waited_s` returns how long the training has waited for other ranks."""

    def __init__(self, reader: Reader, limits: ReaderLimits, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        self._reader = reader
        self._limits = limits
        self._waited_s = waited_s
        fixed = limits.fixed or 0
        self._pace = InputPace(fixed if limits.most is None else min(fixed, limits.most))
        self._pool: Pool | None = None
        self._pool_size = 0
        self.changes: list[InputChange] = []
        """Decisions that were not reported yet."""

    @property
    def notices(self) -> list[str]:
        """What to tell the user once; the first batch may add to it."""
        return self._reader.notices

    def describe(self) -> str:
        """Return in a few words how the dataset is read, and by whom."""
        return f"{self._reader.describe()}, {self._pool_kind().describe(self._pace.readers)}"

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield a batch for each request, in order; requests may be taken ahead. One call at a time."""
        feed = _Feed(iter(requests))
        measured = _Measured(skip=_FIRST_BATCHES)
        while not feed.ended:
            feed.paused = False
            begun = time.perf_counter()
            for timed in self._stream(feed):
                ready, waited_s = time.perf_counter(), self._waited_s()
                yield timed.batch
                now = time.perf_counter()
                measured.add(timed, ready - begun, now - ready - (self._waited_s() - waited_s))
                begun = now
                if self._limits.fixed is None and not feed.paused and measured.is_enough:
                    feed.paused = self._decide(measured.window(), timed.batch)
                    measured = _Measured(skip=READ_AHEAD * self._pace.readers + 1 if feed.paused else 0)

    def close(self) -> None:
        """End the threads or processes that read ahead."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._pool_size = None, 0

    def _decide(self, window: Window, batch: Any) -> bool:
        """Decide how many readers there are from now on; return whether that changes."""
        change = self._pace.decide(window, self._room(batch))
        if change is not None:
            self.changes.append(InputChange(change, window, self._pool_kind().describe(change.readers)))
        return change is not None

    def _room(self, batch: Any) -> Limits:
        """Return how many readers there is room for, with batches of this size."""
        limits = self._limits
        most = [] if limits.most is None else [limits.most]
        if self._pool_kind() is ProcessPool:  # they hand their batches over in shared memory
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in nested_tensors(batch))
            memory = os.statvfs(_SHARED_MEMORY)
            free_bytes = memory.f_bavail * memory.f_frsize / 2 / limits.local_world_size
            most.append(int(free_bytes / max(1, num_bytes * (READ_AHEAD + 1))))
        return Limits(limits.cores, limits.cores - limits.compute_threads, min(most, default=None))

    def _stream(self, feed: _Feed) -> Iterator[TimedBatch]:
        """Yield batches until the feed ends or is paused, and those that are on their way then."""
        if self._reader.draws is None:  # only the first batch tells
            yield from self._read_here(itertools.islice(feed, 1))
        if self._pool_size != self._pace.readers:
            self.close()
            self._pool_size = self._pace.readers
            self._pool = self._pool_kind()(self._reader, self._pool_size) if self._pool_size else None
        yield from self._read_here(feed) if self._pool is None else self._pool.read(feed)

    def _pool_kind(self) -> type[Pool]:
        return ThreadPool if self._reader.is_thread_safe and not self._reader.draws else ProcessPool

    def _read_here(self, requests: Iterable[Request]) -> Iterator[TimedBatch]:
        for request in requests:
            with ExitStack() as kept:
                if self._reader.draws is not False:
                    kept.enter_context(generators_kept())
                if not self._reader.is_thread_safe:
                    kept.enter_context(_one_thread())
                timed = read_timed(self._reader, request)
            yield timed


class _Feed:
    """Requests, until it is paused."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self.paused = False
        self.ended = False

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Request:
        if self.paused:
            raise StopIteration
        try:
            return next(self._requests)
        except StopIteration:
            self.ended = True
            raise


class _Measured:
    """What batches took, the first few left out."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._num = 0
        self._sums = [0.0] * len(Window._fields)

    def add(self, timed: TimedBatch, wait_s: float, step_s: float) -> None:
        """Count a batch."""
        if self._skip and timed.read_s < _WINDOW_S:
            self._skip -= 1
            return
        self._num += 1
        numbers = Window(timed.read_s, timed.cpu_s, wait_s, step_s)
        self._sums = [total + number for total, number in zip(self._sums, numbers, strict=True)]

    @property
    def is_enough(self) -> bool:
        read_s, _, wait_s, step_s = self._sums
        if wait_s + step_s < _WINDOW_S:
            return False
        return self._num >= _WINDOW_BATCHES or read_s > _WINDOW_S

    def window(self) -> Window:
        """Return the means."""
        return Window(*(total / self._num for total in self._sums))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, as worker processes do."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
