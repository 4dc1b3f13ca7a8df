"""A lock that processes and threads of a machine share, and that a killed process releases."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.001


@contextmanager
def file_lock(path: Path, wait_s: float | None) -> Iterator[bool]:
    """Hold the lock of a file, which is created; yield whether it is held.

    It is not if another holds it for longer than `wait_s`; None waits for as long as that takes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    is_held = False
    try:
        is_held = _lock(descriptor, wait_s)
        yield is_held
    finally:
        if is_held:
            # Closing is not enough: a process that was forked meanwhile has the descriptor, too, and keeps the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, wait_s: float | None) -> bool:
    if wait_s is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        else:
            return True
