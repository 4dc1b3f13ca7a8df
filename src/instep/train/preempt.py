"""Being asked to stop: SIGTERM, or SIGUSR1 (the warning that SLURM can send before it takes a machine away).

A handler only notes the wish. It travels to the other ranks with the next step's gradients, so that all know of it at
the same step; there they save and leave. A second signal ends the process at once.

Ranks: any of them may be asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from instep.core.stop import SIGNALS, StopRequest, taking_over


@contextlib.contextmanager
def stop_requests(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Listen for signals that ask to stop, for as long as the block lasts; others may ask through `request`."""
    request = request or StopRequest()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.ask():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may listen
        return
    with taking_over(request.ask):
        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    # Our launcher holds this one back until somebody listens: by default it would end the process.
    was_blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was_blocked)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
