"""WebDataset's tar shards: a sample is the consecutive members with one key, read by index. Never extracted."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from instep.core.errors import DataError, SpecError
from instep.data.sources.block_dataset import BlockDataset, SourceOptions
from instep.data.sources.format import Block, FileIndex, SourceFormat
from instep.data.sources.sample_rows import SampleRows, is_too_large
from instep.data.sources.scan import Scan
from instep.data.sources.source_file import LocalFile, SourceFile
from instep.data.sources.storage import Urls
from instep.data.sources.tar_headers import Member, Sample, members
from instep.data.sources.tar_walk import find_walk

_INDEX_VERSION = 2
"""Of what is found in an archive: 1 left out regular files of the kinds 7 and zero."""

# Both as in WebDataset: what stands before the first dot of the file's name is the key, the rest the extension.
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "txt": lambda data: data.decode("utf-8"),
    "json": json.loads,
    "cls": int,
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}
"""By the last part of the extension; everything else stays bytes."""


def kind_of(extension: str) -> str:
    """Return how members with this extension are decoded."""
    name = extension.rpartition(".")[2]
    return name if name in _DECODERS else "bytes"


def tar(url: Urls, members: Sequence[str] | None = None, **options: Unpack[SourceOptions]) -> BlockDataset:
    """Open WebDataset's tar shards: a folder, a pattern, a file, or a list of these; here, or wherever fsspec reaches.

    A sample is the dict of the consecutive members that have one key: `__key__`, and an entry for each extension. txt
    is decoded to str, json to its value, cls to int, npy to an array; everything else stays bytes, to be decoded in
    `map`. `members`: the extensions that every sample has, of which others are left out; None: those of the first.
    """
    if isinstance(members, str):
        raise SpecError(f"members={members!r} is a text, not a list of extensions: use members=[{members!r}].")
    return BlockDataset(url, Tar(members), **options)


class Tar(SourceFormat):
    """A block is some MiB of consecutive samples, headers included, so that the index needs no members' places."""

    name = "tar"
    suffixes = (".tar",)

    def __init__(self, members: Sequence[str] | None = None) -> None:
        """`members`: the extensions that make up a sample, others are left out; None: those of the first sample."""
        self._members = None if members is None else frozenset(members)

    @property
    def options(self) -> Any:
        """What the index depends on besides the files."""
        return {"version": _INDEX_VERSION, "members": None if self._members is None else sorted(self._members)}

    @property
    def indexes_in_parallel(self) -> bool:
        """Whether headers are walked through in C."""
        return find_walk() is not None

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return where the blocks are; reads the headers, and with them small members ([Note: Every byte once])."""
        walk = find_walk()
        if walk is not None and isinstance(file, LocalFile):
            plain = walk.index(file, self._members)
            if plain is not None:
                return FileIndex(plain.blocks, _schema(plain.extensions))
        scan = Scan(file)
        blocks: list[Block] = []

        def add_block() -> None:
            scan.keep_block(start, end - start)
            blocks.append(Block(len(blocks), num_rows, start, end - start))

        required = self._members
        num_rows, start, end = 0, 0, 0
        for sample in _samples(members(scan.read, 0, file.num_bytes, is_whole=True)):
            required = required or frozenset(sample.members)
            _check_members(file.url, sample, required, exact=self._members is None)
            if is_too_large(sample.end - start, num_rows + 1):
                add_block()
                num_rows, start = 0, sample.start
            num_rows, end = num_rows + 1, sample.end
        if num_rows:
            add_block()
        return FileIndex(blocks, _schema(required or ()))

    def read_block(self, file: SourceFile, block: Block) -> SampleRows:
        """Return the samples of a block, which are decoded when they are asked for."""
        data, walk = memoryview(file.read(block.start, block.num_bytes)), find_walk()
        plain = None if walk is None else walk.samples(block.start, data)
        samples = _samples_of_block(block.start, data) if plain is None else plain
        if len(samples) != block.num_rows:
            raise ValueError(f"it holds {len(samples)} samples, and the index says {block.num_rows}")
        return _TarRows(block.start, data, samples, self._members)


def _schema(extensions: Iterable[str]) -> dict[str, str]:
    return {name: kind_of(name) for name in sorted(extensions)}


def _samples_of_block(start: int, data: memoryview) -> list[Sample]:
    in_block = members(
        lambda place, size: bytes(data[place - start : place - start + size]), start, start + len(data), is_whole=False
    )
    return list(_samples(in_block))


class _TarRows(SampleRows):
    """The samples of a block."""

    def __init__(self, start: int, data: memoryview, samples: Sequence[Sample], wanted: frozenset[str] | None) -> None:
        super().__init__(len(data))
        self._start, self._data, self._samples, self._wanted = start, data, samples, wanted

    def row(self, number: int) -> dict[str, Any]:
        """Return one sample: its key, and what its members hold."""
        sample = self._samples[number]
        row: dict[str, Any] = {"__key__": sample.key}
        for extension, member in sample.members.items():
            if self._wanted is None or extension in self._wanted:
                row[extension] = self._decode(extension, member)
        return row

    def _decode(self, extension: str, member: Member) -> Any:
        place = member.data_start - self._start
        data = bytes(self._data[place : place + member.num_bytes])
        decode = _DECODERS.get(kind_of(extension))
        if decode is None:
            return data
        try:
            return decode(data)
        except (ValueError, EOFError) as error:
            raise ValueError(f"the member {member.name!r} is no {extension}: {error}") from error


def _samples(members: Iterable[Member]) -> Iterator[Sample]:
    """Group consecutive members that share a key."""
    key, grouped = "", dict[str, Member]()
    for member in members:
        match = None if member.name.startswith("__") and _META.match(member.name) else _KEY.match(member.name)
        if match is None:
            continue
        if grouped and match[1] != key:
            yield Sample(key, grouped)
            grouped = {}
        key, extension = match[1], match[2].lower()
        if extension in grouped:
            raise ValueError(f"the sample {key!r} has two members with the extension {extension!r}")
        grouped[extension] = member
    if grouped:
        yield Sample(key, grouped)


def _check_members(url: str, sample: Sample, required: frozenset[str], exact: bool) -> None:
    if sample.members.keys() == required:
        return
    names = frozenset(sample.members)
    if missing := sorted(required - names):
        raise DataError(
            f"{url}: the sample {sample.key!r} at byte {sample.start} has no member with the extension "
            f"{', '.join(map(repr, missing))}, only {sorted(names)}. Every sample must have the members of the first "
            "one; name those that all have with tar(url, members=(…))."
        )
    if exact and (more := sorted(names - required)):
        raise DataError(
            f"{url}: the sample {sample.key!r} at byte {sample.start} also has a member with the extension "
            f"{', '.join(map(repr, more))}, which the first one has not. Name the members that all have with "
            "tar(url, members=(…)); others are then left out."
        )
