"""A barrier between processes, from semaphores in shared memory; in C where that was compiled, else in Python.

`arrive` posts a semaphore for every other rank. `wait` takes the posts of the others, from local rank `first` on; it
returns the local rank of one that has not arrived after a short spin, `ALL` if all have. Data written before `arrive`
is seen after `wait` ([Note: Hand-over]).

[Note: Hand-over]
A rank writes its elements into shared memory with plain stores, then posts a semaphore; the rank that waits for it
reads them with plain loads afterwards. POSIX guarantees that: sem_post, sem_wait and their kin synchronise memory. In
practice a post is an atomic addition with release order, and a successful wait an atomic subtraction with acquire
order, on the same word. So everything a rank wrote before its post is seen after the wait that took it, on x86 and on
ARM. No flag is ever read with a plain load, and nothing relies on the order of plain stores, which ARM does not keep.

Two more links of the chain: torch's CPU kernels have written everything when they return (they join their threads
first), and neither Python nor a compiler moves memory accesses across the call of a foreign function.
"""

import ctypes
import errno
import os
import time
from typing import Any

from instep.world.lane.engine import Engine, LaneView

CELL_BYTES = 64
"""One cache line each, so that ranks that wait for different peers do not disturb each other (sem_t has 32 bytes)."""
ALL = -1
NEVER_NS = 2**62
"""A deadline, on time.monotonic_ns(), that leaves it to the barrier how long to spin."""
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# ctypes releases the GIL during these calls, so a waiting thread does not block the others.
_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str, *types: Any) -> Any:
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_void_p, *types)
    return function


post, try_wait = _function("sem_post"), _function("sem_trywait")
_get_value = _function("sem_getvalue", ctypes.POINTER(ctypes.c_int))
_init = _function("sem_init", ctypes.c_int, ctypes.c_uint)
_timed_wait = _function("sem_timedwait", ctypes.POINTER(_Timespec))
# By the monotonic clock where the C library can (glibc since 2.30): the wall clock may jump.
_has_clock = hasattr(_libc, "sem_clockwait")
_clock_wait = _function("sem_clockwait", ctypes.c_int, ctypes.POINTER(_Timespec)) if _has_clock else None


def create_semaphores(cells: int, size: int) -> None:
    """Create the semaphores of so many ranks in shared memory, from each rank to each other one, with count 0."""
    for cell in range(size * size):
        if _init(cells + cell * CELL_BYTES, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore between processes cannot be created")


def has_post(address: int) -> bool:
    """Return whether there is a post to take. For messages only: it orders no memory."""
    count = ctypes.c_int()
    _get_value(address, ctypes.byref(count))
    return count.value > 0


def wait(address: int, seconds: float) -> bool:
    """Wait at most so long; return whether a post was taken. A signal may end the wait early."""
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


def incoming(view: LaneView) -> dict[int, int]:
    """Return the address at which each other rank posts for this one, by local rank."""
    cell = {other: view.cells + (other * view.size + view.local_rank) * CELL_BYTES for other in range(view.size)}
    return {other: address for other, address in cell.items() if other != view.local_rank}


class CompiledBarrier:
    """The engine's barrier."""

    def __init__(self, engine: Engine, view: LaneView) -> None:
        self._engine, self._view = engine, ctypes.pointer(view)

    def arrive(self) -> None:
        """Post for every other rank."""
        self._engine.arrive(self._view)

    def wait(self, first: int, deadline_ns: int) -> int:
        """Take the others' posts; return the local rank of one that has not arrived, or ALL."""
        return self._engine.wait(self._view, first, deadline_ns)  # type: ignore[no-any-return]


class PythonBarrier:
    """The same with the C library's semaphores, called from Python."""

    def __init__(self, view: LaneView) -> None:
        self._spin_ns = view.spin_ns
        self._incoming = incoming(view)
        self._outgoing = [view.cells + (view.local_rank * view.size + other) * CELL_BYTES for other in self._incoming]

    def arrive(self) -> None:
        for address in self._outgoing:
            post(address)

    def wait(self, first: int, deadline_ns: int) -> int:
        for local_rank, address in self._incoming.items():
            if local_rank >= first and try_wait(address):
                limit = min(time.monotonic_ns() + self._spin_ns, deadline_ns)
                while try_wait(address):
                    if time.monotonic_ns() >= limit:
                        return local_rank
                    os.sched_yield()  # with more ranks than cores, the awaited one may need this core
        return ALL


Barrier = CompiledBarrier | PythonBarrier
"""One rank's side of the barrier."""
