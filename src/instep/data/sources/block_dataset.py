"""A dataset of files whose samples lie in blocks: Parquet's row groups, shards of an archive, pieces of a text.

Ranks: all; each reads what it needs, those of a machine through one cache.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import operator
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
import torch

from instep.core.errors import BadSample, DataError, InstepError
from instep.core.version import __version__
from instep.data.dataset import BatchDataset
from instep.data.order import Indices
from instep.data.sources.block_memory import BlockMemory
from instep.data.sources.format import Block, BlockRows, SourceFormat
from instep.data.sources.index import load_index
from instep.data.sources.index_file import pack
from instep.data.sources.prefetch import Prefetcher
from instep.data.sources.range_cache import RangeCache, check_cache_bytes
from instep.data.sources.shared_blocks import BlockBusy, SharedBlocks
from instep.data.sources.source_file import SourceFile
from instep.data.sources.storage import Urls, find_files

T = TypeVar("T")
_MEMORY_BYTES = 2 << 30
_log = logging.getLogger("instep.data")
_DECODERS = 4
"""Threads that decode blocks at the same time, at most: other ranks of the machine decode theirs."""


class SourceOptions(TypedDict, total=False):
    """What every source takes besides its URL."""

    cache: str | os.PathLike[str] | None
    """The folder for what is fetched from elsewhere, and for indices (~/.cache/instep/data)."""
    cache_bytes: int | None
    """How large the cache may become (20 GiB, or half of the free space if that is less)."""
    index: str | os.PathLike[str] | None
    """Another folder for the index: one beside the data, which several machines share."""
    memory_bytes: int
    """How much memory a process may use for blocks (2 GiB)."""
    storage_options: dict[str, Any] | None
    """For fsspec: credentials, endpoints."""


class BlockDataset(BatchDataset):
    """The samples of some files, in the order of the files."""

    is_thread_safe = True

    def __init__(
        self,
        urls: Urls,
        fmt: SourceFormat,
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        index: str | os.PathLike[str] | None = None,
        memory_bytes: int = _MEMORY_BYTES,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        check_cache_bytes(cache_bytes)
        ranges = RangeCache(cache, cache_bytes)
        self._format, self._memory_bytes = fmt, memory_bytes
        self._files = find_files(urls, fmt.suffixes, ranges, storage_options)
        folder = ranges.folder / "index" if index is None else Path(index).expanduser().absolute()
        entries = load_index(self._files, fmt, folder)
        self._blocks = [pack(entry.content.blocks) for entry in entries]
        self._first_blocks = np.cumsum([0, *(len(blocks) for blocks in self._blocks)])
        self.block_sizes = np.concatenate([blocks.numbers[:, 0] for blocks in self._blocks])
        self._ends = np.cumsum(self.block_sizes)
        self._starts = self._ends - self.block_sizes
        if not len(self):
            raise DataError(f"{self._files[0].url} and {len(self._files) - 1} other files have no rows.")
        self._memory: tuple[int, BlockMemory] | None = None
        self._ahead: Prefetcher | None = None
        self._shared: SharedBlocks | None = None
        self._window_blocks, self._is_warned = 0, False

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files, in the order of their samples."""
        return tuple(self._files)

    def gather(self, indices: torch.Tensor) -> Any:
        """Return these samples as one batch: a dict of tensors and lists."""
        # In the order of the blocks, not in that in which they were decoded.
        parts = sorted(self._parts(indices.numpy(), _gather), key=operator.attrgetter("block"))
        places = np.concatenate([part.places for part in parts])
        back = np.empty_like(places)
        back[places] = np.arange(len(places))
        columns = [part.rows for part in parts]
        _check_names([list(part) for part in columns])
        return {name: _join(name, [part[name] for part in columns], back) for name in columns[0]}

    def rows(self, indices: torch.Tensor, begin_row: Callable[[int], None] | None = None) -> list[Any]:
        """Return these samples one by one."""
        del begin_row
        samples: list[Any] = [None] * len(indices)
        for part in self._parts(indices.numpy(), _rows):
            for place, row in zip(part.places.tolist(), part.rows, strict=True):
                samples[place] = row
        return samples

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample; for a slice, a dataset of these samples."""
        if isinstance(index, slice):
            return super().__getitem__(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.rows(torch.tensor([index % len(self)]))[0]

    def prefetch(self, blocks: Indices) -> None:
        """Begin to fetch blocks that will be read soon: into the cache, or the system's page cache."""
        if self._ahead is None:
            self._ahead = Prefetcher(self._fetch)
        # Each process begins elsewhere, so that those of a machine share the work.
        numbers = blocks.tolist()
        self._window_blocks = max(self._window_blocks, len(numbers))
        self._check_window(blocks)
        first = os.getpid() % max(1, len(numbers))
        self._ahead.add(numbers[first:] + numbers[:first])

    def share_blocks(self, num_processes: int) -> None:
        """Share decoded blocks with the other processes of this machine ([Note: Sharing decoded blocks])."""
        if self._shared is None and num_processes > 1 and any(map(self._format.shares_blocks, self._files)):
            try:
                self._shared = SharedBlocks(self._digest(), self._memory_bytes)
            except OSError as error:
                _log.info("data: decoded blocks are not shared between processes: %s", error)
        if self._shared is not None:
            self._shared.num_processes = num_processes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None, "_ahead": None, "_shared": None}

    def _digest(self) -> str:
        """Return what tells the blocks of this dataset from those of others."""
        files = [(file.url, file.num_bytes, file.version) for file in self._files]
        what = json.dumps([__version__, self._format.name, self._format.options, files])
        return hashlib.sha256(what.encode() + self._ends.tobytes()).hexdigest()[:24]

    def _fetch(self, number: int) -> None:
        if self._shared is not None and number in self._shared:
            return
        file, block = self._locate(number)
        for start, num_bytes in self._format.ranges(file, block):
            file.prefetch(start, num_bytes)

    def _parts(self, indices: Indices, read: Callable[[BlockRows, Indices], T]) -> Iterator[_Part[T]]:
        """Yield what `read` makes of the samples of each block that some lie in; in any order."""
        blocks = np.searchsorted(self._ends, indices, side="right")
        places = np.argsort(blocks, kind="stable")
        blocks = blocks[places]
        rows = indices[places] - self._starts[blocks]
        bounds = [0, *(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1).tolist(), len(blocks)]
        numbers, spans = blocks[bounds[:-1]].tolist(), list(itertools.pairwise(bounds))
        wanted = [(number, last - first) for number, (first, last) in zip(numbers, spans, strict=True)]
        with closing(self._load(wanted)) as loaded:
            for place, block_rows in loaded:
                first, last = spans[place]
                part = self._read_rows(numbers[place], block_rows, rows[first:last], read)
                yield _Part(numbers[place], places[first:last], part)

    def _load(self, wanted: list[tuple[int, int]]) -> Generator[tuple[int, BlockRows]]:
        """Yield the rows of blocks, of each of which so many samples are wanted, with their places in the list.

        Those that another process decodes now come last, so that the processes of a machine decode different ones.
        """
        busy = []
        for place, rows in self._decode(wanted, range(len(wanted)), wait=self._shared is None or len(wanted) < 2):
            if rows is None:
                busy.append(place)
            else:
                yield place, rows
        for place, rows in self._decode(wanted, busy, wait=True):
            assert rows is not None
            yield place, rows

    def _decode(
        self, wanted: list[tuple[int, int]], places: Sequence[int], wait: bool
    ) -> Iterator[tuple[int, BlockRows | None]]:
        """Yield the rows of blocks; decode new ones in several threads. Without `wait`, None for one that is busy.

        The first batch of a window has samples of most of its blocks, so it waits for all of them.
        """
        memory = self._block_memory()
        is_parallel = self._format.decodes_in_parallel
        num_missing = sum(wanted[place][0] not in memory for place in places) if is_parallel else 0
        num_threads = min(num_missing, len(os.sched_getaffinity(0)), _DECODERS)
        if num_threads < 2:
            for place in places:
                yield place, self._block_rows(*wanted[place], wait)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="decode") as threads:
            coming: deque[tuple[int, Future[BlockRows | None]]] = deque()
            try:
                for place in places:
                    coming.append((place, threads.submit(self._block_rows, *wanted[place], wait)))
                    if len(coming) > num_threads:  # not all at once: they need not fit into memory
                        first, future = coming.popleft()
                        yield first, future.result()
                while coming:
                    first, future = coming.popleft()
                    yield first, future.result()
            finally:
                for _, future in coming:
                    future.cancel()

    def _read_rows(
        self, number: int, block_rows: BlockRows, rows: Indices, read: Callable[[BlockRows, Indices], T]
    ) -> T:
        try:
            return read(block_rows, rows)
        except InstepError:
            raise
        except Exception as error:
            file, block = self._locate(number)
            for row in rows.tolist():
                try:
                    read(block_rows, np.array([row]))
                except Exception as of_row:
                    where = f"row {row} of block {block.number} ({block.num_rows} rows)"
                    raise BadSample(_corrupt(file, where, of_row), file.url) from of_row
            raise BadSample(_corrupt(file, f"block {block.number} ({block.num_rows} rows)", error), file.url) from error

    def _block_memory(self) -> BlockMemory:
        if self._memory is None or self._memory[0] != os.getpid():  # threads of a fork's parent may hold its lock
            self._memory = os.getpid(), BlockMemory(self._memory_bytes)
        return self._memory[1]

    def _block_rows(self, number: int, num_samples: int, wait: bool) -> BlockRows | None:
        """Return the rows of a block; without `wait`, None if another process decodes it now."""
        memory = self._block_memory()

        def read() -> BlockRows:
            return self._read_block(number, wait)

        while True:
            try:
                rows = memory.get(number, read, lambda error: type(error) is BadSample, num_samples)
                break
            except BlockBusy:
                if not wait:
                    return None
                # Another thread of this process has asked without waiting, at the same time.
        if memory.capacity is not None and memory.capacity < self._window_blocks:
            self._warn_of_window(memory.capacity)
        return rows

    def _check_window(self, blocks: Indices) -> None:
        """Warn if it is known before they are read that the blocks of a window do not fit into memory."""
        num_bytes = sum(self._format.least_memory_bytes(self._locate(number)[1]) for number in blocks.tolist())
        if num_bytes > self._memory_bytes:
            self._warn_of_window(len(blocks) * self._memory_bytes // num_bytes)

    def _warn_of_window(self, capacity: int) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        _log.warning(
            "data: a shuffle window has %d blocks, and memory_bytes=%d has room for about %d of them: blocks are read "
            "and decoded again and again. Use --shuffle-window %d or less, or a larger memory_bytes.",
            self._window_blocks,
            self._memory_bytes,
            capacity,
            max(1, capacity * len(self) // len(self._ends)),
        )

    def _read_block(self, number: int, wait: bool) -> BlockRows:
        file, block = self._locate(number)
        fmt, shared = self._format, self._shared
        try:
            if shared is not None and fmt.shares_blocks(file):
                content = shared.read(number, lambda: fmt.decode_block(file, block), wait)
                if content is not None:
                    return fmt.rows_of(file, block, content)
            return fmt.read_block(file, block)
        except (InstepError, MemoryError, BlockBusy):
            raise
        except Exception as error:
            file.check_unchanged()
            last = block.start + block.num_bytes
            where = f"block {block.number} ({block.num_rows} rows, bytes {block.start} to {last})"
            raise BadSample(_corrupt(file, where, error), file.url) from error

    def _locate(self, number: int) -> tuple[SourceFile, Block]:
        """Return the file of a block, and the block in it."""
        file = int(np.searchsorted(self._first_blocks, number, side="right")) - 1
        return self._files[file], self._blocks[file][number - int(self._first_blocks[file])]


class _Part(NamedTuple, Generic[T]):
    """Samples that lie in one block."""

    block: int
    places: Indices
    """Among the samples that are asked for."""
    rows: T


def _gather(block: BlockRows, rows: Indices) -> dict[str, Any]:
    return block.gather(rows)


def _rows(block: BlockRows, rows: Indices) -> list[dict[str, Any]]:
    return block.rows(rows)


def _check_names(by_block: list[list[str]]) -> None:
    """Raise DataError if the samples of some blocks have other entries than those of others."""
    other = next((names for names in by_block if set(names) != set(by_block[0])), None)
    if other is not None:
        differing = ", ".join(sorted(map(repr, set(other) ^ set(by_block[0]))))
        raise DataError(
            f"Some samples have {differing} and others do not, so they cannot be stacked to a batch. Define "
            "collate(samples) in the Task, or let map() give all samples the same entries."
        )


def _corrupt(file: SourceFile, where: str, error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    return (
        f"{file.url}, {where}, cannot be read: {words}. Replace the file, or use --on-bad-sample skip, which puts "
        "other samples in the place of those that cannot be read."
    )


def _join(name: str, parts: list[Any], back: Indices) -> Any:
    """Put the parts of a column together, in the order of the samples."""
    if isinstance(parts[0], np.ndarray):
        return torch.from_numpy(np.concatenate(parts).take(back, axis=0))
    if isinstance(parts[0], torch.Tensor):
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.index_select(0, torch.from_numpy(back))
    items = [item for part in parts for item in part]
    items = [items[place] for place in back.tolist()]
    if not isinstance(items[0], torch.Tensor):
        return items
    shapes = {tuple(item.shape) for item in items}
    if len(shapes) > 1:
        raise DataError(
            f"Column {name!r} has rows of different shapes ({', '.join(map(str, sorted(shapes)[:4]))}), which cannot "
            "be stacked. Define collate(samples) in the Task, to pad or pack them; or leave the column out."
        )
    return torch.stack(items)
