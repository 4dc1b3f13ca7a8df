"""One file of a source, of which ranges of bytes are read.

Ranks: all; each reads by itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from instep.core.errors import DataError


class SourceFile(ABC):
    """One file of a source. Several threads may read it at the same time."""

    url: str
    num_bytes: int
    version: str
    """Changes when the content does: a time, or the tag that the storage gives it."""
    path: Path | None = None
    """Where it lies on this machine, to map it into memory; None: elsewhere."""
    is_cached = False
    """Whether what is read of it is kept in a cache."""

    def __init__(self, url: str, num_bytes: int, version: str) -> None:
        self.url, self.num_bytes, self.version = url, num_bytes, version

    def read(self, start: int, num_bytes: int) -> memoryview:
        """Return a range of its bytes, which must lie within the file; raise DataError, which names it."""
        if not 0 <= start <= start + num_bytes <= self.num_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} of a file of {self.num_bytes}")
        return self._read(start, num_bytes)

    def scan(self, start: int, num_bytes: int) -> memoryview:
        """Return a range of its bytes as `read` does, without keeping it: it is not what will be read later."""
        return self._read(start, num_bytes)

    def keep(self, start: int, content: bytes) -> None:
        """Put a range of its bytes, which were read otherwise, where `read` finds it; does nothing without a cache."""
        del start, content

    @abstractmethod
    def prefetch(self, start: int, num_bytes: int) -> None:
        """Bring a range of bytes nearer, so that `read` need not wait for it; return when it is there."""

    @abstractmethod
    def _read(self, start: int, num_bytes: int) -> memoryview: ...

    @abstractmethod
    def current_version(self) -> tuple[int, str]:
        """Return its size and version as they are now."""

    def check_unchanged(self) -> None:
        """Raise DataError if it is not the file any more that it was when the dataset was opened."""
        num_bytes, version = self.current_version()
        if (num_bytes, version) != (self.num_bytes, self.version):
            raise DataError(
                f"{self.url} has changed since this dataset was opened: it had {self.num_bytes} bytes (version "
                f"{self.version}) and has {num_bytes} now (version {version}), so its index does not fit any more. Do "
                "not write to files that a run reads; start the run again."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self.num_bytes} bytes)"


class LocalFile(SourceFile):
    """A file of this machine, or of a file system that it has mounted."""

    def __init__(self, path: Path, stat: os.stat_result) -> None:
        super().__init__(str(path), stat.st_size, str(stat.st_mtime_ns))
        self.path: Path = path

    def _read(self, start: int, num_bytes: int) -> memoryview:
        # Not mapped: a file that is cut off while it is mapped would kill the process.
        try:
            with self.path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_size, str(stat.st_mtime_ns)) != (self.num_bytes, self.version):
                    self.check_unchanged()
                content = bytearray(num_bytes)
                view, done = memoryview(content), 0
                while done < num_bytes:
                    got = os.preadv(file.fileno(), [view[done:]], start + done)
                    if not got:
                        raise DataError(f"{self.url} ended at byte {start + done}, before {start + num_bytes}.")
                    done += got
                return view.toreadonly()
        except OSError as error:
            raise DataError(
                f"{self.url}, bytes {start} to {start + num_bytes}: cannot be read: {error.strerror or error}."
            ) from error

    def prefetch(self, start: int, num_bytes: int) -> None:
        """Ask the system to read a range of bytes into its page cache."""
        try:
            with self.path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # whoever reads it says why

    def current_version(self) -> tuple[int, str]:
        """Return its size and the time of its last change."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.url} cannot be read: {error.strerror or error}.") from error
        return stat.st_size, str(stat.st_mtime_ns)
