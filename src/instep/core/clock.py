"""The clock by which failures are dated.

It is the system's, moved by a shift that is the same in all processes of a machine: a launch may set one, so that
machines whose clocks differ can be had on one. Nothing here reads the environment.
"""

from __future__ import annotations

import time

_shift_ns = 0


def now_ns() -> int:
    """Give the time, in nanoseconds since 1970."""
    return time.time_ns() + _shift_ns


def shift_clock(seconds: float) -> None:
    """Move this process's clock, and that of the processes it forks from now on."""
    global _shift_ns
    _shift_ns = round(seconds * 1e9)


def clock_shift_s() -> float:
    """Tell by how much this process's clock was moved."""
    return _shift_ns / 1e9
