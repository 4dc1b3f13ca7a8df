"""One job at a time beside the training: hashing and writing a snapshot.

Room: a thread of the rank that saves. It spends its time in calls that let other threads run (SHA-256, write, fsync),
at the lowest priority, and is not a daemon: the process ends when the last save is complete.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_NICE = 19


class Background(Generic[T]):
    """Runs a job in a thread, and keeps what became of it until it is collected."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def done(self) -> bool:
        """Whether a job has ended and nobody has collected it."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, job: Callable[[], T]) -> None:
        """Run a job; the one before must have been collected."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(job,), name="instep-save")
        self._thread.start()

    def collect(self) -> T | None:
        """Wait for the job and give its result, or raise its error; None: there was none."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def _run(self, job: Callable[[], T]) -> None:
        with contextlib.suppress(OSError):  # a courtesy: where it is not allowed the training shares its core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._result = job()
        except BaseException as error:  # noqa: BLE001 - whoever collects raises it
            self._error = error
