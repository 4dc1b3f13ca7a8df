"""A source in blocks: the same global batches at any number of ranks and workers, from any step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep.data
from instep.data.batch_plan import BatchSpec
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_chunks, open_loader
from instep.data.loader import LoadOptions
from parquet_files import write_files

BATCH, STEPS = 10, 14
COLUMNS = ["number", "vector", "text", "even"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("source") / "files", [20, 3, 33, 0, 8])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def global_batches(
    dataset: Any, world_size: int, first: int = 0, last: int = STEPS, workers: int = 0, window: int | None = 15
) -> list[dict[str, Any]]:
    """Return the batches of some steps, put together from the parts of all ranks."""
    spec = BatchSpec(seed=3, batch_size=BATCH, shuffle_window=window)
    by_rank = []
    for rank in range(world_size):
        loader = open_loader(dataset, spec, LoadOptions(rank=rank, world_size=world_size, workers=workers, seed=3))
        try:
            by_rank.append(list(loader.steps(first, last)))
        finally:
            loader.source.close()
    whole = []
    for parts in zip(*by_rank, strict=True):
        counted = [part.batch for batch in parts for part in batch.parts if part.plan.counted]
        whole.append(
            {
                "number": torch.cat([part["number"] for part in counted]).tolist(),
                "text": [text for part in counted for text in part["text"]],
                "vector": torch.cat([part["vector"] for part in counted])[:, 0].tolist(),
            }
        )
    return whole


@pytest.fixture(scope="module")
def expected(folder: Path, cache: Path) -> list[dict[str, Any]]:
    return global_batches(instep.data.parquet(folder, columns=COLUMNS, cache=cache), 1)


def test_every_sample_once_an_epoch_and_epochs_differ(expected: list[dict[str, Any]]) -> None:
    numbers = [number for batch in expected for number in batch["number"]]
    assert sorted(numbers[:64]) == sorted(numbers[64:128]) == list(range(64))
    assert numbers[:64] != numbers[64:128]
    for batch in expected:
        assert batch["text"] == [f"row {number}" for number in batch["number"]]
        assert batch["vector"] == batch["number"]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world_size=st.sampled_from([1, 2, 3, 5]), first=st.integers(0, STEPS - 1), memory=st.sampled_from([1, 1 << 30]))
def test_any_ranks_from_any_step(
    expected: list[dict[str, Any]], folder: Path, cache: Path, world_size: int, first: int, memory: int
) -> None:
    dataset = instep.data.parquet(folder, columns=COLUMNS, cache=cache, memory_bytes=memory)
    assert global_batches(dataset, world_size, first) == expected[first:]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_workers(expected: list[dict[str, Any]], folder: Path, cache: Path, workers: int) -> None:
    dataset = instep.data.parquet(folder, columns=COLUMNS, cache=cache)
    assert global_batches(dataset, 2, 3, workers=workers) == expected[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_mapped_in_processes(expected: list[dict[str, Any]], folder: Path, cache: Path, workers: int) -> None:
    dataset = instep.data.parquet(folder, columns=COLUMNS, cache=cache).map(lambda sample: sample)
    assert isinstance(dataset, BatchDataset)
    assert global_batches(dataset, 2, workers=workers) == expected


def test_an_evaluation_reads_the_files_in_order(folder: Path, cache: Path) -> None:
    dataset = instep.data.parquet(folder, columns=COLUMNS, cache=cache)
    numbers = {}
    for rank in range(3):
        for place, (batch, rows) in enumerate(
            open_chunks(dataset, 9, LoadOptions(rank=rank, world_size=3, workers=0, seed=0)).read()
        ):
            numbers[place * 3 + rank] = batch["number"][:rows].tolist()
    assert [number for place in sorted(numbers) for number in numbers[place]] == list(range(64))


def test_a_block_is_read_once_an_epoch(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instep.data.sources.parquet import Parquet

    read: list[tuple[str, int]] = []
    plain = Parquet.read_block
    monkeypatch.setattr(
        Parquet,
        "read_block",
        lambda self, file, block: read.append((file.url, block.number)) or plain(self, file, block),
    )
    dataset = instep.data.parquet(folder, columns=COLUMNS, cache=cache, memory_bytes=2500)
    global_batches(dataset, 1, 0, 7)
    num_blocks = sum(size > 0 for size in dataset.block_sizes)
    assert len(set(read)) == num_blocks
    assert num_blocks <= len(read) <= num_blocks + 2, "blocks of a window are kept until it is over"
