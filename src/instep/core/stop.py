"""Being asked to stop, by signals.

[Note: Asked before anybody listens]
The first imports take seconds, and by default a signal ends a process, or is lost on the first one of a container. So a
command has an `EarlyStop` for its handler from its first moment on, which keeps the wish. Whoever comes to listen finds
that handler in place, and takes its wish over.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ECHO_S = 1.0
"""Signals this close together are one wish: a scheduler may tell a job, its launcher and each of its processes."""


class StopRequest:
    """Whether a process was asked to stop."""

    def __init__(self) -> None:
        early = _early_stop()
        self.asked: bool = early is not None and early.request.asked
        self._asked_at: float = early.request._asked_at if early is not None else 0.0

    def ask(self) -> bool:
        """Note a wish to stop; tell whether it is a second one, which means: at once."""
        now = time.monotonic()
        if self.asked:
            return now - self._asked_at > _ECHO_S
        self.asked, self._asked_at = True, now
        return False


class EarlyStop:
    """A handler that keeps the wish to stop; see [Note: Asked before anybody listens]."""

    def __init__(self, end: Callable[[int], None]) -> None:
        """Have `end` called at a second wish, which means: at once."""
        self.request = StopRequest()
        self.heed: Callable[[], object] | None = None
        self._end = end

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal."""
        if self.request.ask():
            self._end(number)
        elif self.heed is not None:
            self.heed()


def keep_stops(end: Callable[[int], None], numbers: Sequence[signal.Signals] = SIGNALS) -> Callable[[], None]:
    """Keep wishes to stop from now on; give what undoes it. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    early = EarlyStop(end)
    before = {number: signal.signal(number, early) for number in numbers}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    return undo


@contextlib.contextmanager
def taking_over(heed: Callable[[], object]) -> Iterator[None]:
    """Have a wish heeded that was kept, or that comes before another handler is there."""
    early = _early_stop()
    if early is None:
        yield
        return
    early.heed = heed
    if early.request.asked:
        heed()
    try:
        yield
    finally:
        early.heed = None


def _early_stop() -> EarlyStop | None:
    handler = signal.getsignal(signal.SIGUSR1)
    return handler if isinstance(handler, EarlyStop) else None
