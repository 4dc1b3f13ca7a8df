"""Blocks are announced before they are read, each once; a window that does not fit into memory is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import instep.data
from instep.data.batch_plan import BatchSpec
from instep.data.blocks_ahead import announced
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions, evaluation_chunks
from instep.data.sources import jsonl
from parquet_files import write_files


class InBlocks(BatchDataset):
    """Notes what is announced, and what is read without having been."""

    def __init__(self, sizes: list[int]) -> None:
        self.block_sizes = np.array(sizes)
        self.ends = np.cumsum(sizes)
        self.announced = list[int]()
        self.most_ahead = 0

    def __len__(self) -> int:
        return int(self.ends[-1])

    def prefetch(self, blocks: Any) -> None:
        self.announced += blocks.tolist()

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        read = np.unique(np.searchsorted(self.ends, indices.numpy(), side="right")).tolist()
        assert set(read) <= set(self.announced), "every block is announced before it is read"
        self.most_ahead = max(self.most_ahead, len(self.announced) - self.announced.index(read[-1]))
        return indices


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=150), st.integers(1, 20), st.integers(1, 3))
def test_an_evaluation_announces_its_blocks(sizes: list[int], chunk: int, world_size: int) -> None:
    sizes = [*sizes, 1]
    for rank in range(world_size):
        dataset, read = InBlocks(sizes), list[int]()
        options = LoadOptions(rank=rank, world_size=world_size, workers=0, seed=0)
        for batch, counted in evaluation_chunks(dataset, chunk, options):
            read += batch[:counted].tolist()
        expected = [
            index
            for first in range(rank * chunk, sum(sizes), world_size * chunk)
            for index in range(first, min(first + chunk, sum(sizes)))
        ]
        assert read == expected
        assert len(set(dataset.announced)) == len(dataset.announced)
        assert dataset.most_ahead <= 32 + chunk + 1


def test_what_does_not_lie_in_blocks_is_left_alone() -> None:
    spans = [range(2), range(2, 5)]
    assert list(announced(torch.arange(5), spans)) == spans


def _train(dataset: Any, window: int, num_steps: int = 10) -> None:
    loader = open_loader(
        dataset, BatchSpec(seed=0, batch_size=20, shuffle_window=window), LoadOptions(workers=0, seed=0)
    )
    list(loader.steps(0, num_steps))


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"x": row, "text": "t" * 80}) + "\n" for row in range(1000)))
    return path


def test_a_window_that_does_not_fit_into_memory_is_named(
    lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Known from the files; and, where blocks are decoded, when memory is full.
    _train(instep.data.jsonl(lines, cache=tmp_path / "cache", memory_bytes=5_000), 200)
    files = write_files(tmp_path / "files", [400], rows_per_group=10)
    decoded = instep.data.parquet(files, columns=["number"], cache=tmp_path / "cache", memory_bytes=400)
    _train(decoded, 100)
    jsonl_words, parquet_words = (record.getMessage() for record in caplog.records)
    assert "a shuffle window has 23 blocks, and memory_bytes=5000 has room for about 5 of them" in jsonl_words
    assert "Use --shuffle-window 44 or less, or a larger memory_bytes" in jsonl_words
    assert "a shuffle window has 10 blocks, and memory_bytes=400 has room for about 4" in parquet_words
    assert "--shuffle-window 40 or less" in parquet_words


def test_a_window_that_fits_is_not_named(lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(instep.data.jsonl(lines, cache=tmp_path / "cache", memory_bytes=25_000), 200, num_steps=100)
    assert not caplog.records
