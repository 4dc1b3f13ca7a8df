"""Operations that their caller does not wait for.

[Note: Two ways in]
A caller that waits anyway (instep itself, `dist.all_reduce(t)`) computes in its own thread. An asynchronous
operation (DDP's buckets, `async_op=True`) must not block its caller: a program may rely on going on, for instance to
send what the other rank waits for before it joins. Those are done by one thread a group, in the order of the calls,
and a caller that waits comes after them. To wake that thread and to be woken by it takes longer than most
operations, so where there are no cores to spare the caller begins the work itself, for as long as the others are
there too, and leaves to the thread what would keep it waiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


def done(result: Any) -> Any:
    """Give the work of an operation that has been done already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Pending(dist.Work):
    """An operation under way. c10d's own work of a future would keep an error, and Ctrl-C, from who waits for it."""

    def __init__(self, ended: threading.Event, failures: list[Exception], future: Any) -> None:
        super().__init__()
        self._ended, self._failures, self._future = ended, failures, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise what went wrong."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._ended.wait(seconds or None):
            raise TimeoutError(f"the operation was not done within {seconds:g} s.")
        if self._failures:
            raise self._failures[0]
        return True

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        return self._ended.is_set()

    def get_future(self) -> Any:
        """Give what callbacks can be added to."""
        return self._future


class Background:
    """Does a group's asynchronous operations, one after the other ([Note: Two ways in])."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None], result: Any) -> Pending:
        """Have something done; give the work that can be waited for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instep-collectives", daemon=True)
            self._thread.start()
        computed: torch.futures.Future[Any] = torch.futures.Future()
        failures: list[Exception] = []
        ended = self._last = threading.Event()

        def job() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001 - raised where the work is waited for
                failures.append(error)
            try:
                computed.set_result(None)  # callbacks run here, and may speak: only then is it over
            finally:
                ended.set()

        def give(_: Any) -> Any:
            # An exception in a callback is the only one that C++, DDP for instance, sees as an error.
            if failures:
                raise failures[0]
            return result

        pending = Pending(ended, failures, computed.then(give))
        self._jobs.put(job)
        return pending

    @property
    def busy(self) -> bool:
        """Whether something that was submitted is not over yet."""
        return self._last is not None and not self._last.is_set()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that does the work: a callback, which nobody else can help."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        if self._last is None:
            return
        if self.is_here:
            while not self._jobs.empty() and self._next():
                pass
        else:
            self._last.wait()

    def end(self) -> None:
        """End the thread, after what it is doing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        job = self._jobs.get()
        if job is None:
            self._jobs.put(None)  # also for whoever called a callback that called this
            return False
        job()
        return True
