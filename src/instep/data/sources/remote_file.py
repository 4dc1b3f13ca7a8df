"""Files of an object store or a web server, read through fsspec and a cache on this machine's disk.

Ranks: all; those of one machine share the cache.
"""

from __future__ import annotations

from typing import Any

from instep.core.errors import DataError, SpecError
from instep.data.sources.range_cache import RangeCache
from instep.data.sources.retry import TruncatedRead, retrying
from instep.data.sources.source_file import SourceFile

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "modified",
    "created",
)


class RemoteFile(SourceFile):
    """A file that fsspec reads."""

    is_cached = True

    def __init__(
        self, url: str, num_bytes: int, version: str, cache: RangeCache, storage_options: dict[str, Any]
    ) -> None:
        super().__init__(url, num_bytes, version)
        self._cache, self._storage_options = cache, storage_options

    def _read(self, start: int, num_bytes: int) -> memoryview:
        return self._cache.read(self._key(start, num_bytes), num_bytes, lambda: self._fetch(start, num_bytes))

    def scan(self, start: int, num_bytes: int) -> memoryview:
        """Fetch a range of bytes past the cache."""
        return memoryview(self._fetch(start, num_bytes))

    def keep(self, start: int, content: bytes) -> None:
        """Write a range of bytes into the cache."""
        self._cache.fill(self._key(start, len(content)), len(content), lambda: content)

    def prefetch(self, start: int, num_bytes: int) -> None:
        """Fetch a range of bytes into the cache, unless another thread or process does so now."""
        self._cache.fill(self._key(start, num_bytes), num_bytes, lambda: self._fetch(start, num_bytes))

    def _key(self, start: int, num_bytes: int) -> str:
        return f"{self.url}\n{self.num_bytes}\n{self.version}\n{start}\n{num_bytes}"

    def _fetch(self, start: int, num_bytes: int) -> bytes:
        def request() -> bytes:
            # Connected anew in a forked process: connections do not survive a fork. fsspec keeps one per process.
            filesystem, path = connect(self.url, self._storage_options)
            content: bytes = filesystem.cat_file(path, start=start, end=start + num_bytes)
            if len(content) != num_bytes:
                raise TruncatedRead(f"{len(content)} bytes came in place of {num_bytes}")
            return content

        return retrying(f"{self.url}, bytes {start} to {start + num_bytes}", request)

    def current_version(self) -> tuple[int, str]:
        """Return its size and version as the storage tells them now."""
        filesystem, path = connect(self.url, self._storage_options)
        filesystem.invalidate_cache()
        info = retrying(self.url, lambda: filesystem.info(path))
        return int(info["size"]), version_of(info)


def connect(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, this process's one, and the path there."""
    try:
        import fsspec
    except ImportError:
        raise SpecError(f"{url} is read through fsspec, which is not installed: pip install 'instep[data]'.") from None
    try:
        return fsspec.core.url_to_fs(url, **_quiet_retries(url, storage_options))  # type: ignore[no-any-return]
    except ImportError as error:
        raise SpecError(f"{url} cannot be opened: {error}.") from error
    except ValueError as error:
        raise DataError(f"{url} cannot be opened: {error}.") from error


def _quiet_retries(url: str, storage_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with botocore's own retries turned off.

    Their pauses are drawn from Python's global generator, which belongs to the training. `retrying` does the same.
    """
    if not url.startswith(("s3://", "s3a://")) or "config_kwargs" in storage_options:
        return storage_options
    return {**storage_options, "config_kwargs": {"retries": {"max_attempts": 0}}}


def version_of(info: dict[str, Any]) -> str:
    """Return what a storage tells about a file that changes with its content."""
    return next((str(info[key]).strip('"') for key in _VERSION_KEYS if info.get(key)), "")
