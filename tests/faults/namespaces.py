"""Show a process less of its machine than there is: what containers do, done to a rank from within."""

from __future__ import annotations

import ctypes
import os
import signal

_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def mount(what: str, where: str, options: str = "") -> None:
    """Mount a new file system over a folder, for this process and its children only."""
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None))
    _check(_libc.mount(what.encode(), where.encode(), what.encode(), 0, options.encode() or None))


def enter_pid_namespace() -> None:
    """Go on as the first process of a new PID namespace, as `unshare --pid --fork --mount-proc` would have it."""
    _check(_libc.unshare(_NEW_PIDS))
    child = os.fork()  # the namespace is the children's; nothing has started a thread here yet
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    mount("proc", "/proc")


def _check(failed: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
