"""JSON lines: one JSON object a line, in blocks of whole lines; gzipped files are one block each."""

from __future__ import annotations

import gzip
import json
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from instep.data.sources.block_dataset import BlockDataset, SourceOptions
from instep.data.sources.folder_cache import Pieces
from instep.data.sources.format import Block, FileIndex, SourceFormat
from instep.data.sources.sample_rows import SampleRows
from instep.data.sources.scan import Scan
from instep.data.sources.source_file import SourceFile
from instep.data.sources.storage import Urls

BLOCK_BYTES = 1 << 20
_BLANK = 33
"""Bytes below this are white space, or nothing that a JSON value begins with."""


def jsonl(url: Urls, **options: Unpack[SourceOptions]) -> BlockDataset:
    """Open files of JSON lines: a folder, a pattern, a file, or a list of these; here, or wherever fsspec reaches.

    A sample is the dict of one line; blank lines are left out. In a batch, numbers are tensors, and everything else a
    list with an entry for each sample. A file that ends with .gz can only be read as a whole: it is one block.
    """
    return BlockDataset(url, JsonLines(), **options)


class JsonLines(SourceFormat):
    """A block is about 1 MiB of whole lines; only a block's place and its number of lines are in the index."""

    name = "jsonl"
    suffixes = (".jsonl", ".jsonl.gz")

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return where the blocks are; reads the file ([Note: Every byte once])."""
        if _is_compressed(file):
            lines = _Lines(_decompress(file))
            return FileIndex([Block(0, len(lines.starts), 0, file.num_bytes, 1)])
        blocks: list[Block] = []
        scan, start, line = Scan(file), 0, 1
        while start < file.num_bytes:
            data = _whole_lines(scan, start, file.num_bytes)
            lines = _Lines(data)
            if len(lines.starts):
                scan.keep_block(start, len(data))
                blocks.append(Block(len(blocks), len(lines.starts), start, len(data), line))
            start, line = start + len(data), line + lines.num_lines
        return FileIndex(blocks)

    def read_block(self, file: SourceFile, block: Block) -> SampleRows:
        """Return the lines of a block, which are parsed when they are asked for."""
        data = memoryview(_decompress(file)) if _is_compressed(file) else file.read(block.start, block.num_bytes)
        return self.rows_of(file, block, data)

    def shares_blocks(self, file: SourceFile) -> bool:
        """Return whether the file has to be decompressed."""
        return _is_compressed(file)

    def decode_block(self, file: SourceFile, block: Block) -> Pieces:
        """Return the lines of a compressed file."""
        del block
        return [memoryview(_decompress(file))]

    def rows_of(self, file: SourceFile, block: Block, content: memoryview) -> SampleRows:
        """Return lines, which are parsed when they are asked for."""
        del file
        lines = _Lines(content)
        if len(lines.starts) != block.num_rows:
            raise ValueError(f"it holds {len(lines.starts)} lines, and the index says {block.num_rows}")
        return _JsonRows(content, lines, block.meta)


class _JsonRows(SampleRows):
    """The lines of a block."""

    def __init__(self, data: memoryview, lines: _Lines, first_line: int) -> None:
        super().__init__(len(data))
        self._data, self._lines, self._first_line = data, lines, first_line

    def row(self, number: int) -> dict[str, Any]:
        """Return the object of one line."""
        lines = self._lines
        try:
            value = json.loads(bytes(self._data[lines.starts[number] : lines.ends[number]]))
        except ValueError as error:
            raise ValueError(f"line {self._line(number)} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"line {self._line(number)} is a JSON {type(value).__name__}, not an object with names")
        return value

    def _line(self, number: int) -> int:
        return self._first_line + int(self._lines.numbers[number])


class _Lines:
    """Where the lines of some bytes begin and end; those of white space only are left out."""

    def __init__(self, data: bytes | memoryview) -> None:
        values = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(values == ord("\n"))
        if data and data[-1:] != b"\n":
            ends = np.append(ends, len(data))
        starts = np.append(0, ends[:-1] + 1)[: len(ends)]
        first = values[np.minimum(starts, max(0, len(data) - 1))]
        # Only lines that begin with white space can be blank; hardly any do.
        doubtful = np.flatnonzero((first < _BLANK) | (starts == ends)).tolist()
        blank = [number for number in doubtful if not bytes(data[starts[number] : ends[number]]).strip()]
        self.num_lines = len(ends)
        self.numbers: npt.NDArray[np.int64] = np.delete(np.arange(len(ends)), blank)
        self.starts, self.ends = starts[self.numbers], ends[self.numbers]


def _whole_lines(scan: Scan, start: int, end: int) -> bytes:
    """Return about a block's bytes from here on, up to the end of a line."""
    data = scan.read(start, BLOCK_BYTES)
    while start + len(data) < end:
        if end_of_lines := data.rfind(b"\n") + 1:
            return data[:end_of_lines]
        data += scan.read(start + len(data), BLOCK_BYTES)
    return data


def _is_compressed(file: SourceFile) -> bool:
    return file.url.endswith(".gz")


def _decompress(file: SourceFile) -> bytes:
    return gzip.decompress(file.read(0, file.num_bytes))
