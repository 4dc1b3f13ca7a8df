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
from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future


def done(result: Any) -> Any:
    """Give the work of an operation that has been done already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Background:
    """Does a group's asynchronous operations, one after the other ([Note: Two ways in])."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: torch.futures.Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None], result: Any) -> Any:
        """Have something done; give the work that can be waited for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instep-collectives", daemon=True)
            self._thread.start()
        ended: torch.futures.Future[Any] = torch.futures.Future()
        failures: list[Exception] = []

        def job() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001 - raised where the work is waited for
                failures.append(error)
            ended.set_result(None)

        def give(_: Any) -> Any:
            # An exception in a callback is the only one that C++, DDP for instance, sees as an error.
            if failures:
                raise failures[0]
            return result

        self._last = ended
        work = _create_work_from_future(ended.then(give))
        self._jobs.put(job)
        return work

    @property
    def busy(self) -> bool:
        """Whether something that was submitted is not done yet."""
        return self._last is not None and not self._last.done()

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        if self._last is None:
            return
        if threading.current_thread() is self._thread:  # a callback that speaks itself: nobody else can do it
            while not self._jobs.empty():
                self._next()
        else:
            self._last.wait()
            self._last = None

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
            return False
        job()
        return True
