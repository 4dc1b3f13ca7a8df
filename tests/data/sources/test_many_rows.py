"""A billion rows: what it takes to describe them, and until the first batch is there."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions
from instep.data.order import Indices
from instep.data.sources.block_dataset import BlockDataset
from instep.data.sources.format import Block, BlockRows, FileIndex, SourceFormat
from instep.data.sources.source_file import SourceFile

BLOCKS, ROWS = 100_000, 10_000


class Numbers(SourceFormat):
    """Claims that a file has a billion rows; row i is the number i."""

    name: ClassVar[str] = "numbers"
    suffixes: ClassVar[tuple[str, ...]] = (".bin",)

    def index_file(self, file: SourceFile) -> FileIndex:
        return FileIndex([Block(number, ROWS, number, 1) for number in range(BLOCKS)], {"number": "int64"})

    def read_block(self, file: SourceFile, block: Block) -> BlockRows:
        return _Rows(block)


class _Rows(BlockRows):
    def __init__(self, block: Block) -> None:
        self._first = block.number * ROWS

    def gather(self, rows: Indices) -> dict[str, Any]:
        return {"number": rows + self._first}

    def rows(self, rows: Indices) -> list[dict[str, Any]]:
        return [{"number": number} for number in (rows + self._first).tolist()]


def test_a_billion_rows(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(BLOCKS))

    def first_batch(step: int) -> list[int]:
        dataset = BlockDataset(tmp_path, Numbers(), cache=tmp_path / "cache")
        assert len(dataset) == 10**9
        spec = BatchSpec(seed=0, batch_size=256)
        (batch,) = open_loader(dataset, spec, LoadOptions(workers=0, seed=0)).steps(step, step + 1)
        return list(batch.parts[0].batch["number"].tolist())

    first_batch(0)  # builds the index
    begun = time.process_time()  # of the processor: a busy machine may take longer
    numbers = first_batch(5_000_000)  # in the middle of epoch 2
    assert time.process_time() - begun < 1
    assert len(set(numbers)) == 256
    tracemalloc.start()
    first_batch(5_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
