"""Requests to stop, by signals.

[Note: Asked before anybody listens]
The first imports take seconds. By default a signal ends a process, or is ignored by the first process of a container.
So a command installs an `EarlyStop` as its handler before anything else, which keeps the request. The code that handles
requests later finds that handler in place, and takes the request over.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAVING = "Ctrl-C: saving after this step; once more ends it at once."
_ECHO_S, _KEY_S = 1.0, 0.3
"""Signals this close together are one request: a scheduler may signal a job, its launcher and all its processes.
A person who presses Ctrl-C twice is slower than the launchers that pass it on."""


class StopRequest:
    """Whether a process was asked to stop."""

    def __init__(self) -> None:
        early = _early_stop()
        self.asked: bool = early is not None and early.request.asked
        self._asked_at: float = early.request._asked_at if early is not None else 0.0
        self.interrupted = False
        """Whether it was Ctrl-C that asked."""
        self.ended = False
        """Whether this process has ended what it asked to stop."""
        self._has_begun = False
        self._on_request: Callable[[], object] = lambda: None
        self._on_end: Callable[[], object] = lambda: None

    def listen(self, on_request: Callable[[], object], on_end: Callable[[], object]) -> None:
        """Call `on_request` when this process itself asks to stop, at once if it has, and `on_end` when it insists."""
        self._on_request, self._on_end = on_request, on_end
        if self.asked:
            on_request()

    def request(self) -> None:
        """Ask from within this process, as a first signal does from without."""
        if not self.asked:
            self.ask()
            self._on_request()

    def end(self) -> None:
        """Ask to end at once, as a second signal does."""
        self.asked = self.ended = True
        self._on_end()

    def ask(self, number: int = signal.SIGTERM) -> bool:
        """Record a request to stop; return whether to stop at once: at a second one, or if there is nothing to save."""
        now = time.monotonic()
        if self.asked:
            return now - self._asked_at > (_KEY_S if number == signal.SIGINT else _ECHO_S)
        if number == signal.SIGINT and not self._has_begun:
            return True
        self.asked, self._asked_at, self.interrupted = True, now, number == signal.SIGINT
        return False

    def begin(self) -> None:
        """Note that the run has made a step: from now on Ctrl-C is a request to save, too."""
        self._has_begun = True


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
    return _install(EarlyStop(end), numbers)


def _install(handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals]) -> Callable[[], None]:
    """Install a signal handler; return a function that restores the earlier ones."""
    before = {number: signal.signal(number, handler) for number in numbers}

    def undo() -> None:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)

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


@contextlib.contextmanager
def stop_requests(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Listen for SIGTERM, SIGUSR1 (SLURM's warning before it takes a node away) and Ctrl-C while the block runs.

    The handler only sets the request. It reaches the other ranks with the next step's sums, so that all know of it at
    the same step; there they save and leave. A second signal ends the process at once. A launcher may set `request`
    itself.
    """
    request = request or StopRequest()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.ask(number):
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            os.write(2, f"\n{SAVING}\n".encode())  # a stream may be in the middle of a write

    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may listen
        return
    with taking_over(request.ask):
        undo = _install(on_signal, stop_signals())
    # Our launcher blocks this one until a handler is there: by default it would end the process.
    was_blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was_blocked)
        undo()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask to save and leave: with Ctrl-C, unless it is ignored (in the background)."""
    return (*SIGNALS, signal.SIGINT) if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else SIGNALS


def _early_stop() -> EarlyStop | None:
    handler = signal.getsignal(signal.SIGUSR1)
    return handler if isinstance(handler, EarlyStop) else None
