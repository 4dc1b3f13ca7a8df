"""The thread that runs a group's asynchronous operations.

[Note: Two ways in]
A caller that waits anyway (instep itself, `dist.all_reduce(t)`) computes in its own thread. An asynchronous operation
(DDP's buckets, `async_op=True`) must not block its caller: a program may rely on continuing, for instance to send what
another rank waits for before it joins. Each group has one thread that runs those, in the order of the calls, and a
caller that waits comes after them. Waking that thread and being woken by it takes longer than most operations. So where
there are no spare cores, the caller runs the operation itself until it would have to wait, and leaves the rest to the
thread.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler
from torch._C._distributed_c10d import _create_work_from_future
from torch.autograd import profiler

from instep.world.waits import WAITS


def completed(result: Any) -> Any:
    """Return the work of an operation that is completed."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Pending(dist.Work):
    """The work of an operation in progress. c10d's own work of a future would hide errors and Ctrl-C from `wait`."""

    def __init__(self, ended: threading.Event, failures: list[Exception], future: Any) -> None:
        super().__init__()
        self._ended, self._failures, self._future = ended, failures, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion; raise the operation's error."""
        seconds = timeout.total_seconds() if timeout else None
        with WAITS.for_another_thread():
            has_ended = self._ended.wait(seconds or None)
        if not has_ended:
            raise TimeoutError(f"the operation was not completed within {seconds:g} s.")
        if self._failures:
            raise self._failures[0]
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._ended.is_set()

    def get_future(self) -> Any:
        """Return the future, for callbacks."""
        return self._future


class Background:
    """Runs a group's asynchronous operations, one after the other ([Note: Two ways in])."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None], result: Any) -> Pending:
        """Queue an operation; return its work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="instep-collectives", daemon=True)
            self._thread.start()
        computed: torch.futures.Future[Any] = torch.futures.Future()
        failures: list[Exception] = []
        ended = self._last = threading.Event()

        def job() -> None:
            begun = time.perf_counter()
            try:
                if profiler._is_profiler_enabled:
                    with torch.profiler.record_function("instep.collective"):
                        run()
                else:
                    run()
            except Exception as error:  # noqa: BLE001 - raised where the work is waited for
                failures.append(error)
            WAITS.count_behind(time.perf_counter() - begun)
            try:
                computed.set_result(None)  # runs callbacks, which may communicate: only then has it ended
            finally:
                ended.set()

        def outcome(_: Any) -> Any:
            # An exception in a callback is the only one that C++, DDP for instance, sees as an error.
            if failures:
                raise failures[0]
            return result

        pending = Pending(ended, failures, computed.then(outcome))
        self._jobs.put(job)
        return pending

    @property
    def busy(self) -> bool:
        """Whether a submitted operation has not ended yet."""
        return self._last is not None and not self._last.is_set()

    @property
    def is_here(self) -> bool:
        """Whether the caller is this thread: a callback, which must not wait for the thread."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until all submitted operations have ended."""
        if self._last is None:
            return
        if self.is_here:
            while not self._jobs.empty() and self._next():
                pass
        else:
            self._last.wait()

    def end(self) -> None:
        """End the thread after its current operation."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        job = self._jobs.get()
        if job is None:
            self._jobs.put(None)  # for the outer call, if a callback called this one
            return False
        job()
        return True
