"""What a file format has to say, so that its samples can be read by index: the blocks of a file, and their rows.

To add a format: a `SourceFormat` and its `BlockRows` in a file of this package, and a function that opens a
`BlockDataset` with it. Files are found, indexed, cached and read ahead alike for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from instep.data.order import Indices
from instep.data.sources.folder_cache import Pieces
from instep.data.sources.source_file import SourceFile

Range = tuple[int, int]
"""The first byte, and the number of bytes."""


class Block(NamedTuple):
    """Samples of a file that are read at once."""

    number: int
    """In its file."""
    num_rows: int
    start: int
    num_bytes: int
    meta: Any = None
    """What else the format needs to read it: plain JSON values."""


@dataclass(frozen=True)
class FileIndex:
    """The blocks of one file."""

    blocks: Sequence[Block]
    schema: Any = None
    """What all files of a source must have alike, as plain JSON values: a dict of names and types, for instance."""


class BlockRows(ABC):
    """The rows of one block, in memory. Several threads may ask at the same time."""

    num_bytes: int = 0
    """The memory that it holds; what is mapped from a file does not count."""

    @abstractmethod
    def gather(self, rows: Indices) -> dict[str, Any]:
        """Return these rows as columns: arrays or tensors with a row for each, or lists with an entry for each.

        A list of tensors is stacked if they have one shape.
        """

    @abstractmethod
    def rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return these rows as samples, one by one."""


class SourceFormat(ABC):
    """How files of one format are read. Its methods may be called by several threads at the same time.

    An exception that is not one of instep's own means that the file, the block or the row is corrupt: the dataset
    adds which one.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    """The files of a folder that are read."""
    decodes_in_parallel: ClassVar[bool] = False
    """Whether `read_block` leaves other threads of Python running for most of its time."""

    @property
    def options(self) -> Any:
        """What the index depends on besides the files: plain JSON values."""
        return None

    @property
    def indexes_in_parallel(self) -> bool:
        """Whether `index_file` of a file of this machine leaves other threads running for most of its time."""
        return False

    @abstractmethod
    def index_file(self, file: SourceFile) -> FileIndex:
        """Return the blocks of a file, having read as little of it as possible."""

    @abstractmethod
    def read_block(self, file: SourceFile, block: Block) -> BlockRows:
        """Return the rows of a block."""

    def shares_blocks(self, file: SourceFile) -> bool:
        """Return whether decoding a block may cost more than mapping what another process has decoded.

        If so, there are `decode_block` and `rows_of` ([Note: Sharing decoded blocks]).
        """
        del file
        return False

    def decode_block(self, file: SourceFile, block: Block) -> Pieces:
        """Return a decoded block as bytes that other processes can map; no pickle."""
        raise NotImplementedError

    def rows_of(self, file: SourceFile, block: Block, content: memoryview) -> BlockRows:
        """Return the rows of what `decode_block` returned, without copying it."""
        raise NotImplementedError

    def ranges(self, file: SourceFile, block: Block) -> list[Range]:
        """Return the ranges of bytes that `read_block` asks the file for, to fetch them ahead."""
        del file
        return [(block.start, block.num_bytes)]

    def least_memory_bytes(self, block: Block) -> int:
        """Return how much memory the rows of a block take at least, as far as that is known without reading it."""
        return block.num_bytes
