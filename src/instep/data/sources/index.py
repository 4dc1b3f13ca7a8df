"""The index: the blocks of all files of a source, built once and kept in a folder.

Ranks: all, at the same time; they meet only in the folder.

[Note: Building an index together]
The files whose index is not known are cut into groups. Who comes takes a group by locking it (flock: a killed process
lets go), indexes its files and writes a part of the index under the group's name; the others find the part there. When
every group is done, the whole index is written as one file, which the next start reads at once. Whether an entry still
fits is seen from the size and version of its file, which are looked at on every start; only files that changed are
indexed again. What is read back is checked against a checksum, and counts as absent if that is wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from instep.core.errors import DataError, InstepError
from instep.data.sources.file_lock import file_lock
from instep.data.sources.format import SourceFormat
from instep.data.sources.index_file import IndexEntry, pack, read_entries, write_entries
from instep.data.sources.source_file import SourceFile

_GROUP_FILES = 64
_THREADS = 16
"""That index files that lie elsewhere: each waits for its storage most of the time."""
_LOCAL_THREADS = 4
"""That index files of this machine, at most, if the format lets them: other ranks do the same."""
_SAY_AFTER_S = 2.0
_log = logging.getLogger("instep.data")


def load_index(files: Sequence[SourceFile], fmt: SourceFormat, folder: Path) -> list[IndexEntry]:
    """Return the index of each file, from the folder as far as it is known there; the rest is built and written."""
    stem = _digest([fmt.name, fmt.options, _common_folder([file.url for file in files])])
    whole = folder / f"{fmt.name}-{stem}.index"
    stamp = _stamp(whole)
    known = {entry.url: entry for entry in read_entries(whole)}
    missing = [file for file in files if not _fits(known.get(file.url), file)]
    if missing:
        known.update({entry.url: entry for entry in _build(missing, fmt, whole, stem, stamp)})
    entries = [known[file.url] for file in files]
    check_schemas(entries)
    if missing:
        _write_whole(whole, list(known.values()))  # other patterns may read other files of the folder
    return entries


def _common_folder(urls: Sequence[str]) -> str:
    """Return the folder that all files lie in: it stays the same when files are added."""
    folders = [url.split("/")[:-1] for url in urls]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False))
    return "/".join(names[0] for names in shared)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when another process writes a file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _fits(entry: IndexEntry | None, file: SourceFile) -> bool:
    return entry is not None and (entry.num_bytes, entry.version) == (file.num_bytes, file.version)


def _build(files: list[SourceFile], fmt: SourceFormat, whole: Path, stem: str, stamp: Any) -> list[IndexEntry]:
    size = max(1, min(_GROUP_FILES, len(files) // _GROUP_FILES))
    groups = [files[first : first + size] for first in range(0, len(files), size)]
    progress = _Progress(len(files), fmt.name)
    done: dict[int, list[IndexEntry]] = {}

    def build(number: int, wait: bool) -> None:
        group = groups[number]
        part = whole.with_name(f"{stem}-{_digest([_identity(file) for file in group])}.part")
        with _claimed(part, wait) as is_ours:
            if is_ours:
                done[number] = _build_part(group, part, fmt, whole, stamp)
                progress.add(len(group))

    first = os.getpid() % len(groups)  # ranks that come at the same time begin at different groups
    numbers = [*range(first, len(groups)), *range(first)]
    with ThreadPoolExecutor(min(_num_threads(files[0], fmt), len(groups)), thread_name_prefix="index") as threads:
        list(threads.map(lambda number: build(number, wait=False), numbers))
        # What others were at is there by now, or they are gone.
        list(threads.map(lambda number: build(number, wait=True), [each for each in numbers if each not in done]))
    return [entry for number in range(len(groups)) for entry in done[number]]


def _num_threads(file: SourceFile, fmt: SourceFormat) -> int:
    if file.path is None:
        return _THREADS
    return min(_LOCAL_THREADS, len(os.sched_getaffinity(0))) if fmt.indexes_in_parallel else 1


def _build_part(files: list[SourceFile], part: Path, fmt: SourceFormat, whole: Path, stamp: Any) -> list[IndexEntry]:
    """Index the files of a group, unless another process has: its part is there, or already the whole."""
    for path in (part, whole):
        if path is whole and _stamp(whole) == stamp:
            continue  # it is the one that does not know these files
        known = {entry.url: entry for entry in read_entries(path)}
        if all(_fits(known.get(file.url), file) for file in files):
            return [known[file.url] for file in files]
    entries = [_index(file, fmt) for file in files]
    _try_writing(part, entries)
    return entries


def _index(file: SourceFile, fmt: SourceFormat) -> IndexEntry:
    try:
        index = fmt.index_file(file)
    except InstepError:
        raise
    except Exception as error:
        file.check_unchanged()
        words = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{file.url} cannot be read as {fmt.name}: {words}. It has {file.num_bytes} bytes. Is it truncated, or of "
            "another format? Replace it, or leave it out."
        ) from error
    return IndexEntry(file.url, file.num_bytes, file.version, index)


def check_schemas(entries: Sequence[IndexEntry]) -> None:
    """Raise DataError if the files of a source do not have one schema; those without rows may have any."""
    filled = [entry for entry in entries if pack(entry.content.blocks).numbers[:, 0].any()]
    for entry in filled:
        first = filled[0]
        if entry.content.schema != first.content.schema:
            difference = "; ".join(_differences(first, entry)) or "their schemas differ"
            raise DataError(
                f"{first.url} and {entry.url} cannot be read as one source: {difference}. Write them with one schema, "
                "or read only columns that they share."
            )


def _differences(first: IndexEntry, other: IndexEntry) -> Iterator[str]:
    left, right = first.content.schema, other.content.schema
    if not isinstance(left, dict) or not isinstance(right, dict):
        yield f"{left!r} in the first, {right!r} in the second"
        return
    for name in [*left, *(name for name in right if name not in left)]:
        if name not in right:
            yield f"{name!r} is missing in the second"
        elif name not in left:
            yield f"{name!r} is missing in the first"
        elif left[name] != right[name]:
            yield f"{name!r} is {left[name]} in the first and {right[name]} in the second"


def _write_whole(whole: Path, entries: list[IndexEntry]) -> None:
    if _try_writing(whole, entries):
        # Those who still look for a part find the whole, or index once more what they need.
        for part in whole.parent.glob(f"{whole.stem.rpartition('-')[2]}-*.part*"):
            with suppress(OSError):
                part.unlink()


def _try_writing(path: Path, entries: list[IndexEntry]) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_entries(path, entries)
    except OSError as error:
        _log.warning("The index cannot be kept in %s (%s): it is built again at every start.", path.parent, error)
        return False
    return True


@contextmanager
def _claimed(part: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a group of files; yield whether it is held."""
    with ExitStack() as held:
        try:
            is_ours = held.enter_context(file_lock(part.with_suffix(".part.lock"), None if wait else 0))
        except OSError:  # nothing can be written there: everybody indexes everything
            is_ours = True
        yield is_ours


class _Progress:
    """Says in the log how far it is, if it takes long."""

    def __init__(self, num_files: int, what: str) -> None:
        self._num_files, self._what, self._done = num_files, what, 0
        self._begun = time.monotonic()
        self._say_at = self._begun + _SAY_AFTER_S

    def add(self, num_files: int) -> None:
        """Count files that are indexed."""
        self._done += num_files
        now = time.monotonic()
        if now > self._say_at:
            left_s = (now - self._begun) * (self._num_files - self._done) / self._done
            _log.warning(
                "data: indexed %d of %d %s files, about %.0f s left", self._done, self._num_files, self._what, left_s
            )
            self._say_at = now + max(_SAY_AFTER_S, left_s / 10)


def _identity(file: SourceFile | IndexEntry) -> list[Any]:
    return [file.url, file.num_bytes, file.version]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
