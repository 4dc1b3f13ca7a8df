"""A source: the batches of a dataset, one after the other, read here or ahead ([Note: Input that keeps up]).

Ranks: all; each has its own.

[Note: Forks that nobody asked for]
Worker processes are forks of the training process, and some datasets do not survive a fork: a file that they read
through its offset, which all forks share, would give each process another's bytes; a library's threads and locks may
hang; a GPU is lost. Where a person has not asked for worker processes, a dataset that moves the offset of an open file,
or returns tensors of a GPU, is read by the training process. Worker processes that raise, die or take far too long are
given up: the training process reads their batches again, and if that raises too, it is the dataset's own error.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from instep.data.global_generators import restore_generators, save_generators
from instep.data.input_pace import Change, InputPace, Limits, Window
from instep.data.pools import READ_AHEAD, Pool, ProcessPool, ThreadPool, TimedBatch, read_timed
from instep.data.readers import Reader, Request
from instep.world.shared_memory import SHARED_MEMORY
from instep.world.tensors import nested_tensors

_WINDOW_S = 0.5
"""How long to measure before a decision."""
_WINDOW_BATCHES = 8
"""And over how many batches, unless they take longer than that to read."""
_REST_S = 2.0
"""How long to read without measuring after a decision to stay in the training process."""
_FIRST_BATCHES = 2
"""Not counted at the beginning: the first steps take longer, and so may the first batches."""
_TIMEOUT_S = 20.0
"""How long a batch of a worker process may take,"""
_TIMEOUT_READS = 50
"""or how many times as long as in the training process."""


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
    """Reads the batches of one dataset.

    `waited_s` returns how long the training has waited for other ranks. `pins`: who reads ahead hands batches over in
    pinned memory, from which a GPU copies by itself. `share_blocks` is told how many processes of the machine read the
    blocks of the dataset.
    """

    def __init__(
        self,
        reader: Reader,
        limits: ReaderLimits,
        waited_s: Callable[[], float] = lambda: 0.0,
        pins: bool = False,
        share_blocks: Callable[[int], None] = lambda _num_processes: None,
    ) -> None:
        self._reader = reader
        self._limits = limits
        self._pins = pins
        self._waited_s = waited_s
        self._share_blocks = share_blocks
        share_blocks(limits.local_world_size)
        fixed = limits.fixed or 0
        self._pace = InputPace(fixed if limits.most is None else min(fixed, limits.most))
        self._pool: Pool | None = None
        self._pool_size = 0
        self._window = Window(0.0, 0.0, 0.0, 0.0)
        self._may_fork: bool | None = None
        """Whether the dataset survives a fork; None before it was looked at."""
        self._replaced_by_workers = 0
        self.changes: list[InputChange] = []
        """Decisions that were not reported yet."""

    @property
    def notices(self) -> list[str]:
        """What to tell the user once; the first batch may add to it."""
        return self._reader.notices

    @property
    def num_replaced(self) -> int:
        """Bad samples in whose place others were read ([Note: Bad samples])."""
        return self._reader.num_replaced + self._replaced_by_workers

    def describe(self) -> str:
        """Return in a few words how the dataset is read, and by whom."""
        return f"{self._reader.describe()}, {self._pool_kind().describe(self._pace.readers)}"

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield a batch for each request, in order; requests may be taken ahead. One call at a time."""
        feed = _Feed(iter(requests))
        measured = _Measured(self._pace.readers, skip=_FIRST_BATCHES + self._pace.readers)
        while feed.resume():
            begun = time.perf_counter()
            for timed in self._stream(feed):
                feed.delivered()
                self._replaced_by_workers += timed.num_replaced
                ready, waited_s = time.perf_counter(), self._waited_s()
                yield timed.batch
                now = time.perf_counter()
                measured.add(timed, ready - begun, now - ready - (self._waited_s() - waited_s))
                begun = now
                if self._limits.fixed is None and not feed.paused and measured.is_enough:
                    feed.paused = self._decide(measured.window(), timed.batch)
                    measured = self._measure_next(feed)
                    if not feed.paused and self._reads_plainly:
                        yield from self._read_unmeasured(feed)
                        begun = time.perf_counter()

    def take_depth(self) -> float | None:
        """Return how many batches were ready when one was asked for, on average since the last call.

        None: nobody reads ahead.
        """
        return None if self._pool is None else self._pool.take_depth()

    def close(self) -> None:
        """End the threads or processes that read ahead."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._pool_size = None, 0

    def _decide(self, window: Window, batch: Any) -> bool:
        """Decide how many readers there are from now on; return whether that changes."""
        self._window = window
        if self._reader.is_sequential and self._pace.readers:
            return False  # another process would have to read everything again up to here
        change = self._pace.decide(window, self._room(batch))
        if change is not None:
            self._note(change)
        return change is not None

    def _measure_next(self, feed: _Feed) -> _Measured:
        """Return what measures from now on: after a change, without the old readers' batches and the new ones' first.

        The first batches of new readers come all at once, after these have started.
        """
        readers = self._pace.readers
        skip = feed.num_on_their_way + (readers + 1 if readers else 0) if feed.paused else 0
        return _Measured(readers, skip)

    def _note(self, change: Change) -> None:
        self.changes.append(InputChange(change, self._window, self._pool_kind().describe(change.readers)))

    def _room(self, batch: Any) -> Limits:
        """Return how many readers there is room for, with batches of this size."""
        limits = self._limits
        most = [] if limits.most is None else [limits.most]
        if self._pool_kind() is ProcessPool:  # they hand their batches over in shared memory
            tensors = nested_tensors(batch)
            if self._may_fork is False or any(tensor.device.type != "cpu" for tensor in tensors):
                return Limits(limits.cores, 0.0, most=0)
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            memory = os.statvfs(SHARED_MEMORY)
            free_bytes = memory.f_bavail * memory.f_frsize / 2 / limits.local_world_size
            most.append(int(free_bytes / max(1, num_bytes * (READ_AHEAD + 1))))
        return Limits(limits.cores, limits.cores - limits.compute_threads, min(most, default=None))

    def _stream(self, feed: _Feed) -> Iterator[TimedBatch]:
        """Yield batches until the feed ends or is paused, and those that are on their way then."""
        if self._reader.draws is None:  # only the first batch tells
            yield from self._read_here(itertools.islice(feed, 1))
        is_chosen = self._limits.fixed is None and self._pace.readers > 0
        if is_chosen and self._pool_kind() is ProcessPool and self._may_fork is None:
            yield from self._look_at_files(feed)
        if self._pool_size != self._pace.readers:
            self.close()
            self._pool_size = self._pace.readers
            timeout_s = max(_TIMEOUT_S, _TIMEOUT_READS * self._window.read_s) if is_chosen else 0.0
            num_readers = max(1, self._pool_size) if self._pool_kind() is ProcessPool else 1
            self._share_blocks(self._limits.local_world_size * num_readers)
            if self._pool_size:
                self._pool = self._pool_kind()(self._reader, self._pool_size, timeout_s, self._pins)
        if self._pool is None:
            yield from self._read_here(feed)
            return
        try:
            yield from self._pool.read(feed)
        except Exception as error:
            if not is_chosen:
                raise
            self._pool.close(at_once=True)
            self._pool = None
            feed.take_back()
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            self._stay(f"{self._pool_kind().describe(self._pool_size)} it failed ({reason})")

    def _look_at_files(self, feed: _Feed) -> Iterator[TimedBatch]:
        """Read a batch here, and stay here if that moves the offset of a file ([Note: Forks that nobody asked for])."""
        before = _offsets()
        yield from self._read_here(itertools.islice(feed, 1))
        after = _offsets()
        self._may_fork = all(after.get(file, offset) == offset for file, offset in before.items())
        if not self._may_fork:
            self._stay("the dataset keeps a file open, whose offset worker processes would share")

    def _stay(self, reason: str) -> None:
        """Read here from now on."""
        self._may_fork = False
        self._pace = InputPace()
        self._note(Change(0, reason))

    def _pool_kind(self) -> type[Pool]:
        return ThreadPool if self._reader.is_thread_safe and not self._reader.draws else ProcessPool

    @property
    def _reads_plainly(self) -> bool:
        """Whether batches are read here, with nothing around it."""
        return self._pool is None and self._reader.draws is False and self._reader.is_thread_safe

    def _read_unmeasured(self, feed: _Feed) -> Iterator[Any]:
        """Yield batches for a while without measuring, which takes as long as reading some of them."""
        until, read = time.perf_counter() + _REST_S, self._reader.read
        for request in feed.requests:  # not those on their way: there are none
            yield read(request)
            if time.perf_counter() > until:
                return
        feed.has_ended = True

    def _read_here(self, requests: Iterable[Request]) -> Iterator[TimedBatch]:
        for request in requests:
            if self._reads_plainly:
                yield read_timed(self._reader, request)
                continue
            state = None if self._reader.draws is False else save_generators()
            try:
                with one_thread() if not self._reader.is_thread_safe else nullcontext():
                    timed = read_timed(self._reader, request)
            finally:
                if state is not None:
                    restore_generators(state)
            yield timed


class _Feed:
    """Requests, until it is paused."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self.requests = requests
        self._on_their_way: deque[Request] = deque()
        self.paused = False
        self.has_ended = False

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Request:
        if self.paused:
            raise StopIteration
        try:
            request = next(self.requests)
        except StopIteration:
            self.has_ended = True
            raise
        self._on_their_way.append(request)
        return request

    def resume(self) -> bool:
        """End a pause; return whether there may be more."""
        self.paused = False
        return not self.has_ended

    def delivered(self) -> None:
        """Note that the oldest request's batch is there."""
        self._on_their_way.popleft()

    @property
    def num_on_their_way(self) -> int:
        """How many requests were taken whose batches are not there."""
        return len(self._on_their_way)

    def take_back(self) -> None:
        """Yield the requests again whose batches are not there."""
        self.requests = itertools.chain(self._on_their_way, self.requests)
        self._on_their_way, self.has_ended = deque(), False


class _Measured:
    """What batches took, the first few left out.

    Readers that start together deliver together, and then nothing for as long as they read: to count only some of that
    is to count no waiting, or all of it. So as many batches as there are readers are the least that is measured.
    """

    def __init__(self, readers: int, skip: int) -> None:
        """`readers` read ahead; 0: the training process reads, where slow batches are not left out."""
        self._readers, self._skip = readers, skip
        self._num = 0
        self._sums = Window(0.0, 0.0, 0.0, 0.0)

    def add(self, timed: TimedBatch, wait_s: float, step_s: float) -> None:
        """Count a batch."""
        if self._skip and (self._readers or timed.read_s < _WINDOW_S):
            self._skip -= 1
            return
        self._num += 1
        sums = self._sums
        self._sums = Window(sums[0] + timed.read_s, sums[1] + timed.cpu_s, sums[2] + wait_s, sums[3] + step_s)

    @property
    def is_enough(self) -> bool:
        read_s, _, wait_s, step_s = self._sums
        if wait_s + step_s < _WINDOW_S or self._num < max(1, self._readers):
            return False
        return self._num >= _WINDOW_BATCHES or read_s > _WINDOW_S

    def window(self) -> Window:
        """Return the means."""
        return Window(*(total / self._num for total in self._sums))


def _offsets() -> dict[tuple[str, str], str]:
    """Return the offsets of the regular files that are open for reading, by number and path."""
    offsets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            info = Path(f"/proc/self/fdinfo/{entry.name}").read_text().split()
            is_read_only = int(info[info.index("flags:") + 1], 8) & os.O_ACCMODE == os.O_RDONLY
            if is_read_only and stat.S_ISREG(entry.stat().st_mode):
                offsets[entry.name, str(entry.readlink())] = info[info.index("pos:") + 1]
    return offsets


@contextmanager
def one_thread() -> Iterator[None]:
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
