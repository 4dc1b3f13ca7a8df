"""Files of raw token ids behind a URL: blocks of consecutive next-token samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError
from instep.data.order import Indices
from instep.data.sources.block_dataset import BlockDataset
from instep.data.sources.format import Block, BlockRows, FileIndex, SourceFormat
from instep.data.sources.source_file import SourceFile
from instep.data.sources.storage import Urls

SUFFIXES = (".bin", ".tokens")
BLOCK_BYTES = 1 << 20


def open_remote_tokens(urls: Urls, length: int, dtype: np.dtype[Any], options: dict[str, Any]) -> BlockDataset:
    """Open files of token ids behind URLs."""
    dataset = TokenBlocks(urls, Tokens(length, dtype), **options)
    dataset.sample_tokens = length
    return dataset


class TokenBlocks(BlockDataset):
    """Next-token samples, whose batches are `(x, y)`."""

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these samples."""
        columns = super().gather(indices)
        return columns["x"], columns["y"]

    def rows(self, indices: torch.Tensor, begin_row: Callable[[int], None] | None = None) -> list[Any]:
        """Return these samples one by one."""
        return [(sample["x"], sample["y"]) for sample in super().rows(indices, begin_row)]


class Tokens(SourceFormat):
    """A block is about 1 MiB of samples, and the token behind them, which is the last one's target."""

    name = "tokens"
    suffixes = SUFFIXES

    def __init__(self, length: int, dtype: np.dtype[Any]) -> None:
        self._length, self._dtype = length, dtype

    @property
    def options(self) -> Any:
        """What the index depends on besides the files."""
        return [self._length, self._dtype.name]

    def index_file(self, file: SourceFile) -> FileIndex:
        """Return where the blocks are; reads nothing."""
        width = self._dtype.itemsize
        if file.num_bytes % width:
            raise DataError(
                f"{file.url} has {file.num_bytes} bytes, which is not a multiple of the {width} bytes of a token "
                f"({self._dtype.name}). Is it truncated, or of another dtype?"
            )
        num_samples = max(0, file.num_bytes // width - 1) // self._length
        step = max(1, BLOCK_BYTES // (self._length * width))
        blocks = []
        for number, first in enumerate(range(0, num_samples, step)):
            rows = min(step, num_samples - first)
            blocks.append(Block(number, rows, first * self._length * width, (rows * self._length + 1) * width))
        return FileIndex(blocks)

    def read_block(self, file: SourceFile, block: Block) -> BlockRows:
        """Return the samples of a block."""
        return _TokenRows(np.frombuffer(file.read(block.start, block.num_bytes), self._dtype), self._length)


class _TokenRows(BlockRows):
    """The samples of a block: x and y, shifted by one token."""

    def __init__(self, tokens: npt.NDArray[Any], length: int) -> None:
        self.num_bytes = tokens.nbytes
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]

    def gather(self, rows: Indices) -> dict[str, torch.Tensor]:
        """Return these samples as columns."""
        windows = self._windows[rows].astype(np.int64)
        return {"x": torch.from_numpy(windows[:, :-1].copy()), "y": torch.from_numpy(windows[:, 1:].copy())}

    def rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return these samples, one by one."""
        columns = self.gather(rows)
        return [{name: column[row] for name, column in columns.items()} for row in range(len(rows))]
