"""Signal handlers of a launch: set for its time, restored afterwards."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from instep.core.stop import StopRequest, stop_signals

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


def handle_stops(
    request: StopRequest,
    has_begun: Callable[[], bool],
    ask: Callable[[signal.Signals], None],
    end: Callable[[signal.Signals], None],
) -> None:
    """Make the first SIGTERM, SIGUSR1 or Ctrl-C call `ask`, and the second `end`, which raises.

    Until the run `has_begun`, Ctrl-C has nothing to save, and ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and has_begun():
            request.begin()
        was_asked = request.asked
        if request.ask(number):
            end(signal.Signals(number))
        elif not was_asked:
            ask(signal.Signals(number))

    for number in stop_signals():
        signal.signal(number, on_signal)
