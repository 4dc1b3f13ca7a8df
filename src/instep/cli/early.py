"""Signals that come before the training has started. Imports nothing that takes long.

See [Note: Asked before anybody listens] in core/stop.py.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from instep.core.errors import EXIT_ENVIRONMENT, EXIT_INTERRUPTED
from instep.core.stop import SIGNALS, keep_stops
from instep.world.environment import launcher_here


def keep_early_stops() -> Callable[[], None]:
    """Keep SIGTERM and SIGUSR1 until the training handles them; return a function that undoes this."""
    # torchrun also sends SIGTERM when another rank has failed; this one would then wait for it until it is killed.
    return keep_stops(_end, (signal.SIGUSR1,) if launcher_here() == "torchrun" else SIGNALS)


def end_by_sigterm() -> None:
    """Make SIGTERM end this process, also as the first one of a container, where the kernel ignores it by default."""
    signal.signal(signal.SIGTERM, _end)


def end_by_every_interrupt() -> None:
    """Make a Ctrl-C end this process also where Python ignores the KeyboardInterrupt: in the callback of a weakref.

    Every import has such callbacks. Once a launch handles Ctrl-C, nothing changes.
    """
    report = sys.unraisablehook

    def end_if_interrupted(unraisable: Any) -> None:
        is_handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if is_handled or unraisable.exc_type is not KeyboardInterrupt:
            report(unraisable)
            return
        os.write(2, b"interrupted\n")
        os._exit(EXIT_INTERRUPTED)

    sys.unraisablehook = end_if_interrupted


def _end(number: int, _frame: FrameType | None = None) -> None:
    name = signal.Signals(number).name
    os.write(2, f"instep: ended by {name}: a person or the scheduler asked this job to stop.\n".encode())
    os._exit(EXIT_ENVIRONMENT)  # an exception could be ignored, see end_by_every_interrupt
