"""What the kernel knows of a process: its state, children, CPU time, and the system call it is blocked in.

Signals only a process that is provably the intended one ([Note: Whom to signal]).

[Note: Whom to signal]
SIGUSR2 ends a process that does not handle it, and a pid may have been reused. So the process is first opened as a
pidfd, which keeps referring to it whatever happens to the pid. Then its start time is compared, and its signal mask is
read: it must catch the signal, and have the stacks file open, which no program that it executed would. Only then is
it signalled, through the pidfd.
"""

import contextlib
import functools
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from instep.guard.pulse import start_ticks_of

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
    """Return the kernel's letter for a process's state; empty: it has ended, or the pid was reused."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields or start_ticks not in (None, int(fields[19])) or fields[0] in "ZX":
        return ""
    return fields[0]


def system_call_of(pid: int) -> str:
    """Return the system call that a process's main thread is blocked in; empty: none, or an unknown one."""
    number = _text(f"/proc/{pid}/syscall").split(" ", 1)[0]
    return _CALLS.get(int(number), "") if number.isdigit() else ""


def descendants_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have.

    psutil would read every process of the machine, for each rank again.
    """
    descendants = []
    for task in _listed(f"/proc/{pid}/task"):
        for child in _text(f"/proc/{pid}/task/{task}/children").split():
            descendants += [int(child), *descendants_of(int(child))]
    return descendants


def spent_by(pids: list[int]) -> Spent:
    """Add up what processes have computed, read and written."""
    import psutil  # 15 ms, and only needed when a job is quiet

    cpu_s, io_bytes = 0.0, 0
    for pid in pids:
        # It has ended, or is not ours to read; or this kernel does not count I/O, and psutil has no such method.
        with contextlib.suppress(psutil.Error, AttributeError, RuntimeError):
            process = psutil.Process(pid)
            cpu_s += sum(process.cpu_times()[:4])
            io = process.io_counters()
            io_bytes += io.read_chars + io.write_chars
    return Spent(cpu_s, io_bytes)


def ask_for_stack(pid: int, start_ticks: int | None, file: Path) -> bool:
    """Make a process append its stacks to the file; return whether it was signalled ([Note: Whom to signal])."""

    def is_intended() -> bool:
        known = start_ticks is None or start_ticks_of(pid) == start_ticks
        return known and _catches(pid, signal.SIGUSR2) and _has_open(pid, file)

    return _signal(pid, signal.SIGUSR2, is_intended)


def kill(pid: int, start_ticks: int) -> None:
    """Kill a process, if it is still the intended one."""
    _signal(pid, signal.SIGKILL, lambda: start_ticks_of(pid) == start_ticks)


def _signal(pid: int, number: signal.Signals, is_intended: Callable[[], bool]) -> bool:
    """Signal a process if it is the intended one, which is checked while a pidfd holds it; return whether it was."""
    with contextlib.ExitStack() as stack:
        send = functools.partial(os.kill, pid)
        try:
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
            send = functools.partial(signal.pidfd_send_signal, descriptor)
        except ProcessLookupError:
            return False
        except OSError:  # an old kernel, or a container that forbids it: use the pid
            pass
        with contextlib.suppress(OSError):  # it has just ended
            if is_intended():
                send(number)
                return True
    return False


def _catches(pid: int, number: int) -> bool:
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _has_open(pid: int, file: Path) -> bool:
    folder = f"/proc/{pid}/fd"
    for name in _listed(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}") == str(file):
                return True
    return False


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # it has ended, or is not ours to read
        return ""
