"""The cache: ranges of bytes of remote files, in a folder that the processes of a machine share.

Ranks: all, at the same time; they meet only in the folder.

[Note: A cache that processes share]
An entry is a file: the bytes, then a trailer with their number and checksum. It is written under a temporary name and
renamed, so it is whole or absent; what a power failure tears is found by the checksum, which each process computes when
it opens an entry first, and the entry is fetched again. Who fetches holds a lock (flock) on one of a fixed number of
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from instep.core.errors import DataError
from instep.data.sources.file_lock import file_lock

Fetch = Callable[[], bytes]
DEFAULT_FOLDER = Path("~/.cache/instep/data")
_DEFAULT_BYTES = 20 << 30
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


class RangeCache:
    """A bounded folder of ranges of bytes. Several threads and processes may use it at the same time."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        """`max_bytes`: 20 GiB, but not more than half of what the disk has free besides the cache, if None."""
        self.folder = Path(folder or DEFAULT_FOLDER).expanduser().absolute()
        self._max_bytes: int | None = max_bytes
        self._verified: dict[str, float] = {}
        """Entries whose checksum this process has seen to be right, and when it marked them as used."""
        self._unseen_bytes = 0
        """What this process has written since it looked at the folder."""
        self._has_looked = False
        self._full_until = 0.0
        self._is_warned = False
        self._pid = os.getpid()
        self._counting = threading.Lock()

    def read(self, key: str, num_bytes: int, fetch: Fetch) -> memoryview:
        """Return the bytes of an entry; if it is not there, or damaged, they are fetched."""
        path = self._path(key)
        if (content := self._open(path, num_bytes)) is not None:
            return content
        return self._fetch(path, num_bytes, fetch, wait=True) or memoryview(fetch())

    def fill(self, key: str, num_bytes: int, fetch: Fetch) -> None:
        """Fetch an entry that is not there, unless another thread or process does so now."""
        path = self._path(key)
        if not path.exists() and not self._is_full():
            self._fetch(path, num_bytes, fetch, wait=False)

    def _fetch(self, path: Path, num_bytes: int, fetch: Fetch, wait: bool) -> memoryview | None:
        """Fetch an entry and write it, or wait for who does; None if another does, or if it cannot be written."""
        if self._is_full():
            return None
        content: memoryview | None = None
        try:
            with file_lock(self._lock_path(path), wait) as is_locked:
                if not is_locked:
                    return None
                content = self._open(path, num_bytes)  # it may have come while we waited
                if content is None:
                    fetched = fetch()
                    content = memoryview(fetched)
                    self._write(path, fetched)
        except OSError as error:
            self._give_up(error)
            return content
        self._make_room(num_bytes)
        return self._open(path, num_bytes) or content

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.folder / "ranges" / name[:2] / name

    def _lock_path(self, path: Path) -> Path:
        return self.folder / "locks" / f"{int(path.name[:8], 16) % _NUM_LOCKS:04}"

    def _open(self, path: Path, num_bytes: int) -> memoryview | None:
        """Map an entry into memory; return None if it is not there, or is damaged."""
        if num_bytes == 0:
            return memoryview(b"")
        try:
            with path.open("rb", buffering=0) as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (FileNotFoundError, ValueError):  # a file of length 0 cannot be mapped
            return None
        except OSError as error:
            self._give_up(error)
            return None
        content = memoryview(mapped)[:num_bytes]
        used = self._verified.get(path.name)
        if used is None and not _is_sound(memoryview(mapped), num_bytes):
            _log.warning("The cache's entry %s is damaged: it is fetched again.", path)
            with suppress(OSError):
                path.unlink()
            return None
        now = time.monotonic()
        if used is None or now - used > _TOUCH_EVERY_S:
            self._verified[path.name] = now
            with suppress(OSError):  # removed meanwhile
                os.utime(path)
        return content

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One writer at a time, who holds the lock: the name needs nothing of the process.
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file.fileno(), content)
                _write_all(file.fileno(), _TRAILER.pack(_MAGIC, len(content), zlib.crc32(content)))
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
            free = shutil.disk_usage(self.folder).free + sum(entry.num_bytes for entry in self._entries())
            self._max_bytes = min(_DEFAULT_BYTES, free // 2)
        return self._max_bytes

    def _entries(self) -> Iterator[_Entry]:
        with suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / "ranges"):
                for item in os.scandir(folder.path):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        stat = item.stat()
                        yield _Entry(Path(item.path), stat.st_size, stat.st_mtime)

    def _is_full(self) -> bool:
        return time.monotonic() < self._full_until

    def _give_up(self, error: OSError) -> None:
        """Read without the cache for a while, because it cannot be written; say so once."""
        self._full_until = time.monotonic() + _FULL_AGAIN_S
        if not self._is_warned:
            self._is_warned = True
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            _log.warning(
                "The cache %s cannot be %s: %s. Data is read without it, from the storage itself each time. %s",
                self.folder,
                "written" if not is_full else "filled further",
                error.strerror or error,
                "Free some space, or give another folder: cache=FOLDER, cache_bytes=N."
                if is_full
                else "Give another folder: cache=FOLDER.",
            )


class _Entry(NamedTuple):
    path: Path
    num_bytes: int
    used: float


def _is_sound(mapped: memoryview, num_bytes: int) -> bool:
    if len(mapped) != num_bytes + _TRAILER.size:
        return False
    magic, length, checksum = _TRAILER.unpack(mapped[num_bytes:])
    return bool(magic == _MAGIC and length == num_bytes and zlib.crc32(mapped[:num_bytes]) == checksum)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view) :]


def check_cache_bytes(max_bytes: int | None) -> None:
    """Raise DataError for a bound that holds nothing."""
    if max_bytes is not None and max_bytes < 1:
        raise DataError(f"cache_bytes={max_bytes} is not possible: it must be at least 1.")
