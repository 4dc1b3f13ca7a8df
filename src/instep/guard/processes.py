"""What the kernel tells of a process: its state, children, computing time, and the call it is blocked in.

Room: reads /proc; signals only a process that is provably the one that was meant ([Note: Whom to signal]).

[Note: Whom to signal]
SIGUSR2 ends a process that has not asked for it, and a pid may have gone to a stranger. So a process is first held by
a descriptor, which stays its own whatever becomes of the pid; then it is compared with what is known of it (when it
began); then its masks are read: it must catch the signal, and hold the file that the stacks go to, which no program
that it executed would. Only then is it signalled, through the descriptor.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from instep.guard.pulse import start_ticks_of

_TICKS = os.sysconf("SC_CLK_TCK")
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4",
    },
}.get(platform.machine(), {})  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """What a process has used so far."""

    cpu_s: float = 0.0
    io_bytes: int = 0


def state_of(pid: int, start_ticks: int | None) -> str:
    """Give the kernel's letter for a process; empty if it has ended, or the pid is another's now."""
    fields = _stat(pid)
    if not fields or start_ticks not in (None, int(fields[19])) or fields[0] in "ZX":
        return ""
    return fields[0]


def system_call_of(pid: int) -> str:
    """Name the call that a process's main thread is blocked in; empty if it is none, or none that we know."""
    number = _text(f"/proc/{pid}/syscall").split(" ", 1)[0]
    return _CALLS.get(int(number), "") if number.isdigit() else ""


def descendants_of(pid: int) -> list[int]:
    """List the processes that a process has started, and those that they have."""
    found = []
    for task in _listed(f"/proc/{pid}/task"):
        for child in _text(f"/proc/{pid}/task/{task}/children").split():
            found += [int(child), *descendants_of(int(child))]
    return found


def spent_by(pids: list[int]) -> Spent:
    """Add up what processes have computed, read and written."""
    ticks = io_bytes = 0
    for pid in pids:
        fields = _stat(pid)
        ticks += sum(map(int, fields[11:15]))
        for line in _text(f"/proc/{pid}/io").splitlines():
            if line.startswith(("rchar", "wchar")):
                io_bytes += int(line.split()[1])
    return Spent(ticks / _TICKS, io_bytes)


def ask_for_stack(pid: int, start_ticks: int | None, file: Path) -> bool:
    """Have a process append its stacks to the file; False if it cannot be asked ([Note: Whom to signal])."""
    with _held(pid) as send:
        known = start_ticks is None or start_ticks_of(pid) == start_ticks
        return known and _catches(pid, signal.SIGUSR2) and _holds(pid, file) and send(signal.SIGUSR2)


def kill(pid: int, start_ticks: int) -> None:
    """End a process at once, if it is still the one that was meant."""
    with _held(pid) as send:
        if start_ticks_of(pid) == start_ticks:
            send(signal.SIGKILL)


@contextlib.contextmanager
def _held(pid: int) -> Iterator[Callable[[int], bool]]:
    """Hold a process by a descriptor; give what signals it, and tells whether it was there."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda _: False
        return
    except OSError:  # an old kernel, or a container that forbids it: the pid must do
        yield lambda number: _sent(os.kill, pid, number)
        return
    try:
        yield lambda number: _sent(signal.pidfd_send_signal, descriptor, number)
    finally:
        os.close(descriptor)


def _sent(send: Callable[[int, int], None], whom: int, number: int) -> bool:
    try:
        send(whom, number)
    except OSError:  # it has just ended
        return False
    return True


def _catches(pid: int, number: int) -> bool:
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _holds(pid: int, file: Path) -> bool:
    folder = f"/proc/{pid}/fd"
    for name in _listed(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}") == str(file):
                return True
    return False


def _stat(pid: int) -> list[str]:
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # it has ended, or is not for us to read
        return ""
