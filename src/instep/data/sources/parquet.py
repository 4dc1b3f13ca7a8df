"""Parquet files: a row group is a block, of which only the columns that are asked for are read."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

from instep.core.errors import DataError, SpecError
from instep.data.sources.arrow_rows import ArrowRows, as_plain, from_ipc, to_ipc
from instep.data.sources.block_dataset import BlockDataset, SourceOptions
from instep.data.sources.folder_cache import Pieces
from instep.data.sources.format import Block, BlockRows, FileIndex, Range, SourceFormat
from instep.data.sources.source_file import SourceFile
from instep.data.sources.storage import Urls

_LEAST_TAIL, _MOST_TAIL = 4 << 10, 64 << 10
"""How much of a file's end is read at first; the footer is mostly there."""
_GAP_BYTES = 64 << 10
"""Columns that lie this near each other are read at once: a request costs more than these bytes."""
_FOOTERS = 256
"""Footers that are kept in memory."""
_PROTOCOL = b"PAR1"


def parquet(url: Urls, columns: Sequence[str] | None = None, **options: Unpack[SourceOptions]) -> BlockDataset:
    """Open Parquet files: a folder, a pattern, a file, or a list of these; here, or wherever fsspec reaches.

    A sample is a dict with an entry for each column (`columns`: all). In a batch, numbers and booleans are tensors with
    a row for each sample, lists of one length tensors with two dimensions, texts lists of str. Lists of different
    lengths are one tensor for each sample, which the Task's `collate` makes a batch of.
    """
    if isinstance(columns, str):
        raise SpecError(f"columns={columns!r} is a text, not a list of columns: use columns=[{columns!r}].")
    return BlockDataset(url, Parquet(columns), **options)


class Parquet(SourceFormat):
    """Row groups of Parquet files."""

    name: ClassVar[str] = "Parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    decodes_in_parallel: ClassVar[bool] = True

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise SpecError(
                "Parquet is read with pyarrow, which is not installed: pip install 'instep[data]'."
            ) from None
        self._columns = None if columns is None else list(columns)
        self._footers: OrderedDict[tuple[str, str], Any] = OrderedDict()

    @property
    def options(self) -> Any:
        """The columns: the index holds their types, and where they lie."""
        return self._columns

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return the row groups of a file, from its footer."""
        footer = self._footer(file)
        schema = {field.name: str(field.type) for field in footer.schema.to_arrow_schema()}
        chosen = list(schema) if self._columns is None else self._columns
        if absent := [name for name in chosen if name not in schema]:
            raise DataError(
                f"{file.url} has no column {', '.join(map(repr, absent))}. It has {', '.join(map(repr, schema))}."
            )
        blocks = []
        for number in range(footer.num_row_groups):
            ranges = self._column_ranges(footer, number)
            start, end = ranges[0][0], sum(ranges[-1])
            if end > file.num_bytes:
                raise ValueError(f"row group {number} ends at byte {end}")
            blocks.append(Block(number, footer.row_group(number).num_rows, start, end - start))
        return FileIndex(blocks, {name: schema[name] for name in chosen})

    def ranges(self, file: SourceFile, block: Block) -> list[Range]:
        """Return where the columns of a row group lie."""
        return self._column_ranges(self._footer(file), block.number)

    def least_memory_bytes(self, block: Block) -> int:
        """Return 0: between the columns that are read there may be others."""
        del block
        return 0

    def read_block(self, file: SourceFile, block: Block) -> BlockRows:
        """Return the rows of a row group."""
        return ArrowRows(self._read_table(file, block))

    def shares_blocks(self, file: SourceFile) -> bool:
        """Return True: a table is mapped without decoding or copying it."""
        del file
        return True

    def decode_block(self, file: SourceFile, block: Block) -> Pieces:
        """Return a row group as an Arrow IPC stream."""
        return to_ipc(self._read_table(file, block))

    def rows_of(self, file: SourceFile, block: Block, content: memoryview) -> BlockRows:
        """Return the rows of an Arrow IPC stream."""
        del file, block
        return ArrowRows(from_ipc(content))

    def _read_table(self, file: SourceFile, block: Block) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        footer = self._footer(file)
        read = {start: file.read(start, size) for start, size in self._column_ranges(footer, block.number)}
        with pq.ParquetFile(pa.PythonFile(_Pieces(read, file.num_bytes), mode="r"), metadata=footer) as opened:
            table = opened.read_row_group(block.number, columns=self._columns, use_threads=False)
        if table.num_rows != block.num_rows:
            raise ValueError(f"it has {table.num_rows} rows")
        return as_plain(table)

    def _column_ranges(self, footer: Any, number: int) -> list[Range]:
        """Return where the chosen columns of a row group lie, those that are near each other together."""
        group = footer.row_group(number)
        chosen = None if self._columns is None else set(self._columns)
        spans = []
        for place in range(group.num_columns):
            column = group.column(place)
            if chosen is None or column.path_in_schema.partition(".")[0] in chosen or column.path_in_schema in chosen:
                start = column.data_page_offset
                if column.dictionary_page_offset is not None:
                    start = min(start, column.dictionary_page_offset)
                spans.append((start, start + column.total_compressed_size))
        joined: list[list[int]] = []
        for start, end in sorted(spans):
            if joined and start - joined[-1][1] <= _GAP_BYTES:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        return [(start, end - start) for start, end in joined] or [(4, 0)]

    def _footer(self, file: SourceFile) -> Any:
        key = file.url, file.version
        footer = self._footers.get(key)
        if footer is None:
            footer = self._footers[key] = _read_footer(file)
            if len(self._footers) > _FOOTERS:
                self._footers.popitem(last=False)
        return footer


def _read_footer(file: SourceFile) -> Any:
    import pyarrow.parquet as pq

    if file.num_bytes < 12:
        raise ValueError("it is too short")
    size = min(file.num_bytes, max(_LEAST_TAIL, min(_MOST_TAIL, file.num_bytes // 64)))
    tail = bytes(file.read(file.num_bytes - size, size))
    if tail[-4:] != _PROTOCOL:
        raise ValueError(f"it does not end with {_PROTOCOL!r}, as Parquet does")
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed + 4 > file.num_bytes:
        raise ValueError(f"its footer has {needed} bytes")
    if needed > size:
        tail = bytes(file.read(file.num_bytes - needed, needed - size)) + tail
    return pq.read_metadata(io.BytesIO(_PROTOCOL + tail[-needed:]))


class _Pieces(io.RawIOBase):
    """A file of which only some pieces were read."""

    def __init__(self, pieces: dict[int, memoryview], num_bytes: int) -> None:
        self._pieces, self._num_bytes, self._place = pieces, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._num_bytes}[whence]
        self._place = base + offset
        return self._place

    def read_buffer(self, num_bytes: int) -> Any:
        """Return the next bytes without copying them."""
        import pyarrow as pa

        return pa.py_buffer(self._next(num_bytes))

    def read(self, num_bytes: int = -1) -> bytes:
        return bytes(self._next(num_bytes))

    def _next(self, num_bytes: int) -> memoryview:
        for start, piece in self._pieces.items():
            first = self._place - start
            if first >= 0 and first + num_bytes <= len(piece) and num_bytes >= 0:
                self._place += num_bytes
                return piece[first : first + num_bytes]
        raise ValueError(f"bytes {self._place} to {self._place + num_bytes} lie beyond its columns")
