"""Counting semaphores in memory that processes share.

[Note: Hand-over]
A rank writes its numbers into shared memory with plain stores, then posts a semaphore; the rank that waits
for it reads them with plain loads afterwards. That is correct by what POSIX says of sem_post, sem_wait and
their kin (they synchronise memory), and by how they are made: a post is an atomic addition with release
order, a wait that succeeds an atomic subtraction with acquire order, on the same word. So whatever a rank
wrote before its post is seen after the wait that took it, on x86 as on ARM. No flag is ever read with a plain
load, and nothing is assumed of the order of plain stores, which ARM does not keep.

Two more links of the chain: torch's CPU kernels have written everything when they return (threads of their
own are joined before), and neither Python nor a compiler moves memory accesses across the call of a foreign
function that it cannot look into.
"""

from __future__ import annotations

import ctypes
import errno
import time

CELL_BYTES = 64
"""One cache line each, so that ranks that wait for different peers do not disturb each other (sem_t has 32 bytes)."""

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Functions that are called as foreign functions let go of the GIL, so whoever waits holds nobody else up.
_libc = ctypes.CDLL(None, use_errno=True)
post = _libc.sem_post
post.argtypes = (ctypes.c_void_p,)
try_wait = _libc.sem_trywait
try_wait.argtypes = (ctypes.c_void_p,)
_get_value = _libc.sem_getvalue
_get_value.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_init = _libc.sem_init
_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
# By the monotonic clock where the C library can (glibc since 2.30): the clock on the wall may jump.
_clock_wait = getattr(_libc, "sem_clockwait", None)
_timed_wait = _libc.sem_timedwait
_timed_wait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
if _clock_wait is not None:
    _clock_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


def create(address: int) -> None:
    """Make a semaphore of count 0 in shared memory."""
    if _init(address, 1, 0):
        raise OSError(ctypes.get_errno(), "a semaphore between processes cannot be made")


def has_post(address: int) -> bool:
    """Tell whether there is a post to be taken. For a message only: it orders nothing."""
    count = ctypes.c_int()
    _get_value(address, ctypes.byref(count))
    return count.value > 0


def wait(address: int, seconds: float) -> bool:
    """Wait that long at most; tell whether a post was taken. A signal may end the waiting early."""
    until = (time.monotonic() if _clock_wait is not None else time.time()) + seconds
    whole = int(until)
    limit = _Timespec(whole, int((until - whole) * 1e9))
    if _clock_wait is not None:
        failed = _clock_wait(address, _CLOCK_MONOTONIC, ctypes.byref(limit))
    else:
        failed = _timed_wait(address, ctypes.byref(limit))
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.ETIMEDOUT, errno.EINTR):
        return False
    raise OSError(code, "waiting for another process failed")
