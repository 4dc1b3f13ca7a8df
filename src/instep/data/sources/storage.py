"""Where files lie: folders of this machine, and everything that fsspec reaches.

Ranks: all; each lists the files by itself and finds the same ones in the same order.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from instep.core.errors import DataError
from instep.data.sources.range_cache import RangeCache
from instep.data.sources.remote_file import RemoteFile, connect, version_of
from instep.data.sources.retry import retrying
from instep.data.sources.source_file import LocalFile, SourceFile

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def find_files(
    urls: Urls, suffixes: tuple[str, ...], cache: RangeCache, storage_options: dict[str, Any] | None = None
) -> list[SourceFile]:
    """Return the files of a folder, a pattern, a file, or a list of these; those of each folder and pattern sorted.

    Files and folders whose name begins with . or _ are left out, unless they are named.
    """
    if isinstance(urls, (str, os.PathLike)):
        urls = [urls]
    files: list[SourceFile] = []
    names = [os.fspath(url) for url in urls]
    for url in names:
        if is_remote(url):
            files += _remote_files(url, suffixes, cache, storage_options or {})
        else:
            files += _local_files(url.removeprefix("file://"), suffixes)
    if not files:
        raise DataError(f"{', '.join(names) or 'An empty list'} has no files to read.")
    return files


def is_remote(url: str) -> bool:
    """Return whether a URL names something that is not a file of this machine."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme != "file"


def _local_files(url: str, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    root = Path(url).expanduser()
    try:
        if root.is_dir():
            paths = sorted(_walk(root, suffixes))
            if not paths:
                raise DataError(f"The folder {root} has no files that end with {' or '.join(suffixes)}.")
        elif glob.has_magic(url) and not root.exists():
            paths = [Path(name) for name in sorted(glob.glob(str(root), recursive=True))]
            paths = [path for path in paths if path.is_file()]
            if not paths:
                raise DataError(f"No file fits the pattern {url}.")
        else:
            paths = [root]
        # Absolute, because an index is found again by the names of its files.
        return iter([LocalFile(path.absolute(), path.stat()) for path in paths])
    except OSError as error:
        raise DataError(f"{error.filename or url} cannot be read: {error.strerror or error}.") from error


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes) and not _is_hidden(name))


def _raise(error: OSError) -> None:
    raise error


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _remote_files(
    url: str, suffixes: tuple[str, ...], cache: RangeCache, storage_options: dict[str, Any]
) -> Iterator[SourceFile]:
    filesystem, root = connect(url, storage_options)
    filesystem.invalidate_cache()
    infos = retrying(url, lambda: _list(filesystem, root, suffixes))
    if not infos:
        raise DataError(f"{url} has no files that end with {' or '.join(suffixes)}.")
    for path, info in sorted(infos.items()):
        name = filesystem.unstrip_protocol(path)
        yield RemoteFile(name, _size(name, info), version_of(info), cache, storage_options)


def _list(filesystem: Any, root: str, suffixes: tuple[str, ...]) -> dict[str, Any]:
    if glob.has_magic(root):
        infos = filesystem.glob(root, detail=True)
        return {path: _complete(filesystem, path, info) for path, info in infos.items() if info["type"] == "file"}
    info = filesystem.info(root)
    if info["type"] == "file" and (root.endswith(suffixes) or not filesystem.isdir(root)):
        return {root: info}
    infos = filesystem.find(root, detail=True)
    return {
        path: _complete(filesystem, path, info)
        for path, info in infos.items()
        if path.endswith(suffixes) and not any(map(_is_hidden, _below(path, root)))
    }


def _complete(filesystem: Any, path: str, info: Any) -> Any:
    """Return what is known of a file; of an HTTP folder, only a request for each tells its size."""
    return info if info.get("size") is not None else filesystem.info(path)


def _below(path: str, root: str) -> Iterable[str]:
    return PurePosixPath(path.removeprefix(root.rstrip("/")).lstrip("/")).parts


def _size(name: str, info: Any) -> int:
    if info.get("size") is None:
        raise DataError(f"{name}: its storage does not tell its size, so it cannot be read in parts.")
    return int(info["size"])
