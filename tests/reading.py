"""What every source has to hold: the rows of its reference reader, in any order, in the same global batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from instep.data.batch_plan import BatchSpec
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions
from instep.data.sources import sample_rows


def small_blocks(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Cut files into blocks of so many bytes."""
    monkeypatch.setattr(sample_rows, "BLOCK_BYTES", num_bytes)
    monkeypatch.setattr(sample_rows, "MOST_BLOCK_BYTES", num_bytes)


def assert_rows(dataset: BatchDataset, expected: list[Any]) -> None:
    """Check that a dataset has these rows: in their order, in any other, and as a batch."""
    assert len(dataset) == len(expected)
    sizes = dataset.block_sizes
    assert sizes is not None
    assert int(sizes.sum()) == len(expected)
    random = np.random.default_rng(len(expected))
    for indices in (
        np.arange(len(expected)),
        random.permutation(len(expected)),
        random.integers(0, len(expected), 2 * len(expected)),
    ):
        rows = dataset.rows(torch.from_numpy(indices))
        for index, row in zip(indices.tolist(), rows, strict=True):
            assert_same_row(row, expected[index])


def assert_same_row(row: Any, expected: Any) -> None:
    """Check that two samples are alike, types of arrays included."""
    assert list(row) == list(expected)
    for name, value in row.items():
        other = expected[name]
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            assert value.shape == other.shape
            assert np.array_equal(value, other)
        else:
            assert type(value) is type(other), name
            assert value == other, name


def global_batches(dataset: Any, key: str, world_size: int, workers: int = 0, epochs: int = 2) -> list[list[Any]]:
    """Return one column of every global batch of some epochs, put together from all ranks."""
    spec = BatchSpec(seed=3, batch_size=7, shuffle_window=20)
    batches: list[list[Any]] = []
    for rank in range(world_size):
        options = LoadOptions(rank=rank, world_size=world_size, workers=workers, seed=3)
        loader = open_loader(dataset, spec, options)
        try:
            for step in loader.steps(0, loader.num_steps(epochs)):
                if rank == 0:
                    batches.append([])
                values = [value for part in step.parts if part.plan.counted for value in part.batch[key]]
                batches[step.step] += [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        finally:
            loader.source.close()
    return batches


def assert_same_batches(dataset: Any, key: str, num_samples: int) -> None:
    """Check that any number of ranks and workers gives the same global batches, every sample once an epoch."""
    one = global_batches(dataset, key, 1)
    num_steps = len(one) // 2
    epochs = [[value for batch in part for value in batch] for part in (one[:num_steps], one[num_steps:])]
    assert len(set(epochs[0])) == num_samples
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    for world_size, workers in ((2, 0), (3, 1), (5, 0), (1, 2), (2, 3)):
        assert global_batches(dataset, key, world_size, workers) == one, (world_size, workers)
