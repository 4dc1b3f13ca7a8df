"""A lock that processes and threads of a machine share, and that a killed process releases."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file, which is created; yield whether it is held. It is if `wait`, or if nobody has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_held = True
    except BlockingIOError:
        is_held = False
    try:
        yield is_held
    finally:
        if is_held:
            # Closing is not enough: a process that was forked meanwhile has the descriptor, too, and keeps the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
