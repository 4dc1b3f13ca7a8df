"""Signal handlers that launches replace for their time, restored afterwards."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

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
