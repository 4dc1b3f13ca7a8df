"""Blocks in memory: those of the window that is read stay, those of earlier ones go, small data stays whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from instep.data.orders.blocks import BlockOrder
from instep.data.sources.block_memory import BlockMemory
from instep.data.sources.format import BlockRows

NUM_BLOCKS, ROWS, WINDOW = 120, 50, 10


class Rows(BlockRows):
    num_bytes = 1000

    def gather(self, rows: Any) -> dict[str, Any]:
        raise NotImplementedError

    def rows(self, rows: Any) -> list[dict[str, Any]]:
        raise NotImplementedError


def _read_epoch(memory: BlockMemory, part: int) -> int:
    """Read an epoch as a rank does that has `part` samples of each batch; return the most blocks that were kept."""
    order = BlockOrder(0, np.full(NUM_BLOCKS, ROWS), WINDOW * ROWS)
    most = 0
    for first in range(0, NUM_BLOCKS * ROWS, part):
        indices = order.indices(0, np.arange(first, min(first + part, NUM_BLOCKS * ROWS)))
        for block, count in zip(*np.unique(indices // ROWS, return_counts=True), strict=True):
            memory.get(int(block), Rows, lambda error: True, int(count))
        most = max(most, sum(block in memory for block in range(NUM_BLOCKS)))
    return most


@pytest.mark.parametrize("part", [1, 7, 64])
def test_blocks_of_earlier_windows_go(part: int) -> None:
    memory = BlockMemory(max_bytes=200_000)  # room for all, of which an eighth is 25 blocks
    most = _read_epoch(memory, part)
    assert memory.num_read == NUM_BLOCKS  # each once
    assert most <= 5 * WINDOW


def test_small_data_stays() -> None:
    memory = BlockMemory(max_bytes=1000 * NUM_BLOCKS * 8)
    assert _read_epoch(memory, 16) == NUM_BLOCKS
    _read_epoch(memory, 16)
    assert memory.num_read == NUM_BLOCKS


def test_the_bound_holds() -> None:
    memory = BlockMemory(max_bytes=4000)
    assert _read_epoch(memory, 16) == 4
