"""Folders in the shared memory of a machine, which end with the last process that uses them.

Ranks: all, and their data workers; a launcher removes what killed ones left.

[Note: Folders that end with their users]
A user of a folder holds a shared lock (flock) on a file in it, and who can lock that file exclusively knows that there
is no user, and removes the folder: the last process that leaves, or, if all were killed, the launcher when its ranks
have ended, or any later process that opens such a folder. The system releases the locks of a process that is killed.
Children inherit a lock by the fork, and their parent leaves by closing the file, never by unlocking it. A process that
has a lock on a file that was removed meanwhile begins again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import weakref
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its place, not a file of ours
_PREFIX = "instep-shared-"
_USERS = "users"


class SharedFolder:
    """A folder in shared memory that processes of one user open by its name."""

    def __init__(self, name: str) -> None:
        """Open a folder, which is made if it is not there; raise OSError if that is not possible."""
        remove_unused_folders()
        self.path = SHARED_MEMORY / f"{_PREFIX}{os.geteuid()}-{name}"
        users = _join(self.path)
        self._leave = weakref.finalize(self, _leave, self.path, users, os.getpid())

    def close(self) -> None:
        """Leave the folder, and remove it if no other process uses it; also done when this process exits."""
        self._leave()


def remove_unused_folders() -> None:
    """Remove this user's folders that no process uses."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}{os.geteuid()}-*"):
        _remove_unused(path)


def _join(path: Path) -> int:
    """Return the file that locks a folder as one of its users."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # somebody removes the folder now
            if not _is_own(path):
                raise PermissionError(errno.EACCES, "another user's", str(path))
            users = _lock(path / _USERS, fcntl.LOCK_SH)
            if _is_at(users, path / _USERS):
                return users
            os.close(users)


def _leave(path: Path, users: int, pid: int) -> None:
    if os.getpid() == pid:  # in a fork the number may belong to another file
        os.close(users)
        _remove_unused(path)


def _remove_unused(path: Path) -> None:
    with suppress(OSError):  # it has users, or another process removes it, too
        if not _is_own(path):
            return
        users = _lock(path / _USERS, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if _is_at(users, path / _USERS):
                for item in path.iterdir():
                    if item.name != _USERS:
                        shutil.rmtree(item, ignore_errors=True)
                (path / _USERS).unlink()
                path.rmdir()
        finally:
            os.close(users)


def _is_own(path: Path) -> bool:
    """Return whether a path is a folder of this user, and no link; anybody may put something into shared memory."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _lock(path: Path, how: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    return file


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
