"""Signal handlers of a launch: set for its time, restored afterwards."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from instep.core.stop import SIGNALS, StopRequest

_REPLACED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@contextlib.contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the handlers that a launcher (elastic, Ray, ourselves) replaces within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    before = {number: signal.getsignal(number) for number in _REPLACED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python, so not ours to set
                signal.signal(number, handler)


def handle_stops(ask: Callable[[], None], end: Callable[[signal.Signals], None]) -> None:
    """Make the first SIGTERM or SIGUSR1 call `ask`, and the second `end`, which raises."""
    if threading.current_thread() is not threading.main_thread():
        return
    request = StopRequest()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        was_asked = request.asked
        if request.ask():
            end(signal.Signals(number))
        elif not was_asked:
            ask()

    for number in SIGNALS:
        signal.signal(number, on_signal)
