"""Requests to stop, by signals.

[Note: Asked before anybody listens]
The first imports take seconds. By default a signal ends a process, or is ignored by the first process of a container.
So a command installs an `EarlyStop` as its handler before anything else, which keeps the request. The code that handles
requests later finds that handler in place, and takes the request over.
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
"""Signals this close together are one request: a scheduler may signal a job, its launcher and all its processes."""


class StopRequest:
    """Whether a process was asked to stop."""

    def __init__(self) -> None:
        early = _early_stop()
        self.asked: bool = early is not None and early.request.asked
        self._asked_at: float = early.request._asked_at if early is not None else 0.0

    def ask(self) -> bool:
        """Record a request to stop; return whether it is a second one, which means: stop at once."""
        now = time.monotonic()
        if self.asked:
            return now - self._asked_at > _ECHO_S
        self.asked, self._asked_at = True, now
        return False


class EarlyStop:
    """A signal handler that keeps a request to stop; see [Note: Asked before anybody listens]."""

    def __init__(self, end: Callable[[int], None]) -> None:
        """Keep a first request, and call `end` at a second one."""
        self.request = StopRequest()
        self.on_request: Callable[[], object] | None = None
        self._end = end

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.request.ask():
            self._end(number)
        elif self.on_request is not None:
            self.on_request()


def keep_stops(end: Callable[[int], None], numbers: Sequence[signal.Signals] = SIGNALS) -> Callable[[], None]:
    """Keep requests to stop from now on; return a function that undoes this. Has an effect in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    early = EarlyStop(end)
    before = {number: signal.signal(number, early) for number in numbers}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    return undo


@contextlib.contextmanager
def taking_over(on_request: Callable[[], object]) -> Iterator[None]:
    """Call `on_request` for a request that was kept, or that comes before another handler is installed."""
    early = _early_stop()
    if early is None:
        yield
        return
    early.on_request = on_request
    if early.request.asked:
        on_request()
    try:
        yield
    finally:
        early.on_request = None


def _early_stop() -> EarlyStop | None:
    handler = signal.getsignal(signal.SIGUSR1)
    return handler if isinstance(handler, EarlyStop) else None
