"""A folder of entries that the processes of a machine share: bounded, checksummed, and never a reason to stop.

Ranks: all, at the same time; they meet only in the folder.

[Note: A cache that processes share]
An entry is a file: the bytes, then a trailer with their number and checksum. It is written under a temporary name and
renamed, so it is whole or absent; what a power failure tears is found by the checksum, which each process computes when
it opens an entry first, and the entry is made again. Who makes it holds a lock (flock) on one of a fixed number of
lock files, chosen by the entry's name: others that need the entry wait for it, and a process that is killed releases
it. Nobody holds two locks at once, so there is no deadlock. An entry is mapped into memory, so that processes share its
pages, and the file may be removed at any time: the mapping stays. Entries that were used least recently are removed
when the folder is larger than its bound.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import shutil
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from instep.data.sources.file_lock import file_lock

Pieces = Sequence[memoryview]
"""The bytes of an entry, one piece behind the other."""
_TRAILER = struct.Struct("<8sQI")
_MAGIC = b"instep\x00\x01"
_NUM_LOCKS = 4096
_EVICT_TO = 0.9
"""Of the bound: room for what other processes write before they look at the folder again."""
_LOOKS = 64
"""How often a process looks at the folder while it writes as much as the bound."""
_TOUCH_EVERY_S = 60.0
_FULL_AGAIN_S = 60.0
"""How long a process does not write after it found the disk full."""
_OLD_S = 3600.0
"""After which a temporary file was left by a process that is gone."""
_log = logging.getLogger("instep.data")


class FolderCache(ABC):
    """A bounded folder of entries. Several threads and processes may use it at the same time."""

    def __init__(self, folder: Path, kind: str, max_bytes: int | None, most_bytes: int) -> None:
        """`kind`: what the entries are; `max_bytes`: if None, `most_bytes` or half of the free space besides them."""
        self.folder, self._kind = folder, kind
        self._max_bytes, self._most_bytes = max_bytes, most_bytes
        self._verified: dict[str, float] = {}
        """Entries whose checksum this process has seen to be right, and when it marked them as used."""
        self._unseen_bytes = 0
        """What this process has written since it looked at the folder."""
        self._has_looked = False
        self._full_until = 0.0
        self._is_warned = False
        self._pid = os.getpid()
        self._counting = threading.Lock()

    def open(self, key: str, num_bytes: int | None = None) -> memoryview | None:
        """Return the bytes of an entry, `num_bytes` if that is known; None if it is not there, or damaged."""
        return self._open(self._path(key), num_bytes)

    def holds(self, key: str) -> bool:
        """Return whether there is an entry."""
        return self._path(key).exists()

    def make(
        self, key: str, make: Callable[[], Pieces], num_bytes: int | None = None, wait_s: float | None = None
    ) -> memoryview | None:
        """Make an entry that is not there, and return its bytes; wait `wait_s` for another who does, None: for ever.

        Return None if another thread or process still makes it then, or if nothing can be written ([is_full]).
        """
        if self.is_full:
            return None
        path, content, pieces = self._path(key), None, None
        with ExitStack() as held:
            try:
                is_locked = held.enter_context(file_lock(self._lock_path(path), wait_s))
            except OSError as error:
                self._give_up(error)
                return None
            # It may have come while we waited.
            if not is_locked or (content := self._open(path, num_bytes)) is not None:
                return content
            pieces = make()
            try:
                self._check_room(sum(map(len, pieces)))
                self._write(path, pieces)
            except OSError as error:
                self._give_up(error)
                return _joined(pieces)
        self._make_room(sum(map(len, pieces)))
        content = self._open(path, num_bytes)
        return _joined(pieces) if content is None else content

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.folder / self._kind / name[:2] / name

    def _lock_path(self, path: Path) -> Path:
        return self.folder / "locks" / f"{int(path.name[:8], 16) % _NUM_LOCKS:04}"

    def _open(self, path: Path, num_bytes: int | None) -> memoryview | None:
        """Map an entry into memory; return None if it is not there, or is damaged."""
        try:
            with path.open("rb", buffering=0) as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (FileNotFoundError, ValueError):  # a file of length 0 cannot be mapped
            return None
        except OSError as error:
            self._give_up(error)
            return None
        if num_bytes is None:
            num_bytes = len(mapped) - _TRAILER.size
        content = memoryview(mapped)[: max(0, num_bytes)]
        used = self._verified.get(path.name)
        if used is None and not _is_sound(memoryview(mapped), num_bytes):
            _log.warning("The cache's entry %s is damaged: it is made again.", path)
            with suppress(OSError):
                path.unlink()
            return None
        now = time.monotonic()
        if used is None or now - used > _TOUCH_EVERY_S:
            self._verified[path.name] = now
            with suppress(OSError):  # removed meanwhile
                os.utime(path)
        return content

    def _write(self, path: Path, pieces: Pieces) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One writer at a time, who holds the lock: the name needs nothing of the process.
        temporary, num_bytes, checksum = path.with_suffix(".tmp"), 0, 0
        try:
            with temporary.open("wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file.fileno(), piece)
                    num_bytes, checksum = num_bytes + len(piece), zlib.crc32(piece, checksum)
                _write_all(file.fileno(), _TRAILER.pack(_MAGIC, num_bytes, checksum))
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._verified[path.name] = time.monotonic()

    def _make_room(self, written: int) -> None:
        """Count what was written, and remove entries if the folder is larger than its bound."""
        if self._pid != os.getpid():  # a fork: the lock may have been held by a thread that is not here
            self._pid, self._counting, self._has_looked = os.getpid(), threading.Lock(), False
        with self._counting:
            self._unseen_bytes += written + _TRAILER.size
            if self._has_looked and self._unseen_bytes * _LOOKS < self.max_bytes:
                return
            self._unseen_bytes, self._has_looked = 0, True
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        excess = sum(entry.num_bytes for entry in entries) - self.max_bytes * _EVICT_TO
        oldest_temporary = time.time() - _OLD_S
        for entry in entries:
            if entry.path.suffix:  # temporary: somebody writes it, or did before they were killed
                if entry.used > oldest_temporary:
                    continue
            elif excess <= 0:
                continue
            with suppress(OSError):  # another process removes the same ones
                entry.path.unlink()
            excess -= entry.num_bytes
            self._verified.pop(entry.path.name, None)

    @property
    def max_bytes(self) -> int:
        """The bound."""
        if self._max_bytes is None:
            self._max_bytes = min(self._most_bytes, self._free_bytes() // 2)
        return self._max_bytes

    def _free_bytes(self) -> int:
        """Return what the disk has free besides the entries."""
        return shutil.disk_usage(self.folder).free + sum(entry.num_bytes for entry in self._entries())

    def _check_room(self, num_bytes: int) -> None:
        """Raise OSError if no more should be written, though it may be possible."""
        del num_bytes

    def _entries(self) -> Iterator[_Entry]:
        with suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / self._kind):
                for item in os.scandir(folder.path):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        stat = item.stat()
                        yield _Entry(Path(item.path), stat.st_size, stat.st_mtime)

    @property
    def is_full(self) -> bool:
        """Whether nothing is written for a while, because that was not possible."""
        return time.monotonic() < self._full_until

    def _give_up(self, error: OSError) -> None:
        """Do not write for a while, because that is not possible; say so once."""
        self._full_until = time.monotonic() + _FULL_AGAIN_S
        if not self._is_warned:
            self._is_warned = True
            self._warn(error, is_full=error.errno in (errno.ENOSPC, errno.EDQUOT))

    @abstractmethod
    def _warn(self, error: OSError, is_full: bool) -> None:
        """Say that entries cannot be written, and what follows."""


class _Entry(NamedTuple):
    path: Path
    num_bytes: int
    used: float


def _joined(pieces: Pieces) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _is_sound(mapped: memoryview, num_bytes: int) -> bool:
    if num_bytes < 0 or len(mapped) != num_bytes + _TRAILER.size:
        return False
    magic, length, checksum = _TRAILER.unpack(mapped[num_bytes:])
    return bool(magic == _MAGIC and length == num_bytes and zlib.crc32(mapped[:num_bytes]) == checksum)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view) :]
