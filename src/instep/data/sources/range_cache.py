"""The cache: ranges of bytes of remote files, on a disk ([Note: A cache that processes share]).

Ranks: all, at the same time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from instep.core.errors import DataError
from instep.data.sources.folder_cache import FolderCache

Fetch = Callable[[], bytes]
DEFAULT_FOLDER = Path("~/.cache/instep/data")
_DEFAULT_BYTES = 20 << 30
_log = logging.getLogger("instep.data")


class RangeCache(FolderCache):
    """A bounded folder of ranges of bytes."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        """`max_bytes`: 20 GiB, but not more than half of what the disk has free besides the cache, if None."""
        path = Path(folder or DEFAULT_FOLDER).expanduser().absolute()
        super().__init__(path, "ranges", max_bytes, _DEFAULT_BYTES)

    def read(self, key: str, num_bytes: int, fetch: Fetch) -> memoryview:
        """Return the bytes of an entry; if it is not there, or damaged, they are fetched."""
        if not num_bytes:
            return memoryview(b"")
        content = self.open(key, num_bytes)
        if content is None:
            content = self.make(key, lambda: [memoryview(fetch())], num_bytes)
        return memoryview(fetch()) if content is None else content

    def fill(self, key: str, num_bytes: int, fetch: Fetch) -> None:
        """Fetch an entry that is not there, unless another thread or process does so now."""
        if not self.holds(key):
            self.make(key, lambda: [memoryview(fetch())], num_bytes, wait_s=0)

    def _warn(self, error: OSError, is_full: bool) -> None:
        _log.warning(
            "The cache %s cannot be %s: %s. Data is read without it, from the storage itself each time. %s",
            self.folder,
            "filled further" if is_full else "written",
            error.strerror or error,
            "Free some space, or give another folder: cache=FOLDER, cache_bytes=N."
            if is_full
            else "Give another folder: cache=FOLDER.",
        )


def check_cache_bytes(max_bytes: int | None) -> None:
    """Raise DataError for a bound that holds nothing."""
    if max_bytes is not None and max_bytes < 1:
        raise DataError(f"cache_bytes={max_bytes} is not possible: it must be at least 1.")
