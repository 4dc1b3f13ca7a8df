"""A background thread for one job at a time: it hashes and writes a snapshot while training continues.

The thread spends its time in calls that release the GIL (SHA-256, write, fsync), at the lowest priority. It is not a
daemon: the process ends only when the last save is complete.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
_NICE = 19


class Background(Generic[T]):
    """Runs a job in a thread and keeps its result or its error until it is collected."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Future[T] = Future()

    @property
    def busy(self) -> bool:
        """Whether a job is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def done(self) -> bool:
        """Whether a job has ended and has not been collected."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, job: Callable[[], T]) -> None:
        """Run a job; the previous one must have been collected."""
        assert self._thread is None
        self._result = Future()
        self._thread = threading.Thread(target=self._run, args=(job, self._result), name="instep-save")
        self._thread.start()

    def collect(self) -> T | None:
        """Wait for the job, then return its result or raise its error; None if there was no job."""
        if self._thread is None:
            return None
        self._thread.join()
        result, self._thread, self._result = self._result, None, Future()  # keep neither the result nor a traceback
        return result.result()

    @staticmethod
    def _run(job: Callable[[], T], result: Future[T]) -> None:
        with contextlib.suppress(OSError):  # optional: if it is not allowed, the thread competes with training
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            result.set_result(job())
        except BaseException as error:  # noqa: BLE001 - `collect` raises it
            result.set_exception(error)
