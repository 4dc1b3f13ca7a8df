"""Signals that come before the training has started. Imports nothing that takes long.

See [Note: Asked before anybody listens] in core/stop.py.
"""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from instep.core.errors import EXIT_ENVIRONMENT
from instep.core.stop import SIGNALS, keep_stops
from instep.world.environment import launcher_here


def keep_early_stops() -> Callable[[], None]:
    """Keep SIGTERM and SIGUSR1 until the training handles them; return a function that undoes this."""
    # torchrun also sends SIGTERM when another rank has failed; this one would then wait for it until it is killed.
    return keep_stops(_end, (signal.SIGUSR1,) if launcher_here() == "torchrun" else SIGNALS)


def end_by_sigterm() -> None:
    """Make SIGTERM end this process, also as the first one of a container, where the kernel ignores it by default."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None = None) -> None:
    name = signal.Signals(number).name
    print(f"instep: ended by {name}: a person or the scheduler asked this job to stop.", file=sys.stderr, flush=True)
    sys.exit(EXIT_ENVIRONMENT)
