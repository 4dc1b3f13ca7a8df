"""MosaicML's MDS shards, read only: columns of each sample one after the other, described by index.json."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import os
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np

from instep.core.errors import DataError
from instep.data.order import Indices
from instep.data.sources.block_dataset import BlockDataset, SourceOptions
from instep.data.sources.folder_cache import Pieces
from instep.data.sources.format import Block, FileIndex, SourceFormat
from instep.data.sources.mds_encodings import Decode, find_decoder
from instep.data.sources.range_cache import RangeCache
from instep.data.sources.sample_rows import SampleRows, is_too_large
from instep.data.sources.source_file import SourceFile
from instep.data.sources.storage import find_files

_VERSION = 2
_SIZE = np.dtype("<u4")


def mds(url: str | os.PathLike[str], **options: Unpack[SourceOptions]) -> BlockDataset:
    """Open a folder of MosaicML's MDS shards, which has an index.json; here, or wherever fsspec reaches.

    A sample is the dict of its columns. Images (jpeg, png) stay bytes, to be decoded in `map`. A compressed shard can
    only be read as a whole: it is one block.
    """
    folder = os.fspath(url).rstrip("/")
    ranges = RangeCache(options.get("cache"), options.get("cache_bytes"))
    index = find_files(f"{folder}/index.json", (".json",), ranges, options.get("storage_options"))[0]
    shards = read_shards(index.url, bytes(index.read(0, index.num_bytes)))
    fmt = CompressedMds if shards[0].compression else Mds
    dataset = BlockDataset(folder, fmt(index.url, shards), **options)
    if len(dataset.files) != len(shards):
        urls = {file.url for file in dataset.files}
        missing = [shard.file_name for shard in shards if not any(_is_file(name, shard) for name in urls)]
        raise DataError(f"{index.url} lists {', '.join(missing[:5])}, which the folder does not have. Copy it again.")
    return dataset


def _is_file(url: str, shard: Shard) -> bool:
    return url.endswith(f"/{shard.file_name}")


class Shard(NamedTuple):
    """What index.json says of one shard."""

    num_rows: int
    raw_bytes: int
    file_name: str
    """Of the file to read, raw or compressed."""
    file_bytes: int
    compression: str
    """The name of the algorithm, or nothing."""
    columns: tuple[tuple[str, str, int | None], ...]
    """Name, encoding, and the size of its values if they all have one."""

    @property
    def schema(self) -> dict[str, str]:
        """The columns and their encodings."""
        return {name: encoding for name, encoding, _ in self.columns}


def read_shards(url: str, content: bytes) -> list[Shard]:
    """Return the shards that an index.json describes."""
    try:
        index = json.loads(content)
        shards = [_shard(url, shard) for shard in index["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url} is no index of MDS shards: {type(error).__name__}: {error}.") from error
    if not shards:
        raise DataError(f"{url} lists no shards.")
    for shard in shards:
        if (shard.columns, shard.compression) != (shards[0].columns, shards[0].compression):
            raise DataError(
                f"{url}: {shard.file_name} has the columns {shard.schema}, and {shards[0].file_name} has "
                f"{shards[0].schema}. All shards must have the same columns, and be compressed alike."
            )
    return shards


def _shard(url: str, shard: dict[str, Any]) -> Shard:
    if (shard["format"], shard["version"]) != ("mds", _VERSION):
        raise DataError(
            f"{url}: a shard has the format {shard['format']!r}, version {shard['version']}. Only MDS, version "
            f"{_VERSION}, can be read."
        )
    file = shard["zip_data"] or shard["raw_data"]
    columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
    compression = (shard["compression"] or "").partition(":")[0]
    raw_bytes = shard["raw_data"]["bytes"]
    return Shard(shard["samples"], raw_bytes, file["basename"], file["bytes"], compression, tuple(columns))


class Mds(SourceFormat):
    """Raw shards: a block is some MiB of consecutive samples."""

    name = "MDS"
    suffixes: ClassVar[tuple[str, ...]] = (".mds",)

    def __init__(self, url: str, shards: list[Shard]) -> None:
        """`url`: of their index.json."""
        self._shards = {shard.file_name: shard for shard in shards}
        self._columns = [(name, find_decoder(url, name, encoding), size) for name, encoding, size in shards[0].columns]

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return where the blocks are; reads where the samples of the shard begin."""
        shard = self._shard_of(file)
        offsets = _offsets(file.read(0, min(4 * shard.num_rows + 8, file.num_bytes)), shard)
        cuts = [0]
        for row, end in enumerate(offsets[1:].tolist()):
            if is_too_large(end - int(offsets[cuts[-1]]), row + 1 - cuts[-1]):
                cuts.append(row)
        cuts.append(shard.num_rows)
        blocks = [
            Block(number, b - a, int(offsets[a]), int(offsets[b] - offsets[a]))
            for number, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
        return FileIndex(blocks, schema=shard.schema)

    def read_block(self, file: SourceFile, block: Block) -> SampleRows:
        """Return the samples of a block, which are decoded when they are asked for."""
        self._shard_of(file)
        data = bytes(file.read(block.start, block.num_bytes))
        return _MdsRows(data, self._columns, _walk(data, block.num_rows, self._columns))

    def _shard_of(self, file: SourceFile) -> Shard:
        parts = file.url.split("/")
        tails = ("/".join(parts[-count:]) for count in range(1, len(parts)))
        shard = next((self._shards[tail] for tail in tails if tail in self._shards), None)
        if shard is None:
            raise DataError(f"{file.url} is not one of the shards that index.json lists. Move it elsewhere.")
        if file.num_bytes != shard.file_bytes:
            raise DataError(
                f"{file.url} has {file.num_bytes} bytes, and its index.json says {shard.file_bytes}. It is truncated, "
                "or was written again: copy the folder again."
            )
        return shard


class CompressedMds(Mds):
    """Compressed shards: a block is a whole one."""

    suffixes: ClassVar[tuple[str, ...]] = (".zstd", ".gz", ".bz2")

    def __init__(self, url: str, shards: list[Shard]) -> None:
        """`url`: of their index.json."""
        super().__init__(url, shards)
        self._decompress = find_decompressor(url, shards[0].compression)

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return the one block; reads nothing."""
        shard = self._shard_of(file)
        return FileIndex([Block(0, shard.num_rows, 0, file.num_bytes)], schema=shard.schema)

    def read_block(self, file: SourceFile, block: Block) -> SampleRows:
        """Return the samples of a shard, which are decoded when they are asked for."""
        return self.rows_of(file, block, self.decode_block(file, block)[0])

    def shares_blocks(self, file: SourceFile) -> bool:
        """Return True: a shard has to be decompressed."""
        del file
        return True

    def decode_block(self, file: SourceFile, block: Block) -> Pieces:
        """Return the raw shard."""
        raw_bytes = self._shard_of(file).raw_bytes
        data = self._decompress(bytes(file.read(block.start, block.num_bytes)))
        if len(data) != raw_bytes:
            raise ValueError(f"it has {len(data)} bytes decompressed, and index.json says {raw_bytes}")
        return [memoryview(data)]

    def rows_of(self, file: SourceFile, block: Block, content: memoryview) -> SampleRows:
        """Return the samples of a raw shard, which are decoded when they are asked for."""
        del block
        return _MdsRows(content, self._columns, _offsets(content, self._shard_of(file)).tolist())


Columns = list[tuple[str, Decode, int | None]]


class _MdsRows(SampleRows):
    """The samples of a block: each begins with the sizes of the columns that have none of their own."""

    def __init__(self, data: bytes | memoryview, columns: Columns, offsets: list[int]) -> None:
        super().__init__(len(data))
        self._data, self._columns, self._offsets = data, columns, offsets
        self._sizes = _sizes_of(columns)

    def row(self, number: int) -> dict[str, Any]:
        """Return one sample."""
        data, place = self._data, self._offsets[number]
        sizes = iter(self._sizes.unpack_from(data, place))
        place += self._sizes.size
        row = {}
        for name, decode, size in self._columns:
            end = place + (next(sizes) if size is None else size)
            try:
                row[name] = decode(bytes(data[place:end]))
            except ValueError as error:
                raise ValueError(f"the column {name!r}: {error}") from error
            place = end
        return row


def _sizes_of(columns: Columns) -> struct.Struct:
    """Return how to read the sizes at the beginning of a sample."""
    return struct.Struct(f"<{sum(size is None for _, _, size in columns)}I")


def _walk(data: bytes, num_rows: int, columns: Columns) -> list[int]:
    """Return where the samples of a block begin, and its end; their sizes say it."""
    sizes = _sizes_of(columns)
    fixed = sizes.size + sum(size or 0 for _, _, size in columns)
    offsets, place = [0], 0
    for _ in range(num_rows):
        if place + sizes.size > len(data):
            break
        place += fixed + sum(sizes.unpack_from(data, place))
        offsets.append(place)
    if place != len(data) or len(offsets) != num_rows + 1:
        raise ValueError(f"the sizes of its samples do not add up to its {len(data)} bytes: it is damaged")
    return offsets


def _offsets(data: bytes | memoryview, shard: Shard) -> Indices:
    """Return where the samples of a shard begin, and the end of the last one, by the shard's head."""
    head = np.frombuffer(data, _SIZE, min(len(data) // 4, shard.num_rows + 2)).astype(np.int64)
    offsets = head[1:]
    is_sound = len(head) == shard.num_rows + 2 and head[0] == shard.num_rows and offsets[-1] == shard.raw_bytes
    if not is_sound or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"its first bytes do not describe the {shard.num_rows} samples and {shard.raw_bytes} bytes that index.json "
            "says: it is damaged, or was written again"
        )
    return offsets


def find_decompressor(url: str, name: str) -> Callable[[bytes], bytes]:
    """Return how to decompress a shard; raise DataError if nothing here can."""
    if name in _DECOMPRESSORS:
        return _DECOMPRESSORS[name]
    if name != "zstd":
        raise DataError(
            f"{url}: the shards are compressed with {name!r}. instep reads zstd, gz and bz2: write them again."
        )
    try:
        from zstandard import ZstdDecompressor
    except ImportError:
        raise DataError(f"{url}: the shards are compressed with zstd. Install it: pip install zstandard.") from None
    return lambda data: bytes(ZstdDecompressor().decompressobj().decompress(data))


_DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.decompress, "bz2": bz2.decompress}
