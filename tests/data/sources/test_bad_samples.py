"""Bad samples with --on-bad-sample skip: others in their place, the same ones for everybody, counted and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import instep.data
from instep.core.errors import BadSample, DataError
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import first_rows, open_loader
from instep.data.loader import LoadOptions
from parquet_files import corrupt_row_group, write_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_files(tmp_path / "files", [20, 20])
    corrupt_row_group(folder / "000.parquet", 1)  # the rows 7 to 13
    return folder


def load(dataset: Any, world_size: int, first: int = 0, workers: int = 0) -> tuple[list[list[int]], int]:
    """Return the numbers of each global batch, and how many were replaced."""
    spec = BatchSpec(seed=1, batch_size=8, shuffle_window=14)
    numbers: list[list[int]] = [[] for _ in range(first, 10)]
    replaced = 0
    for rank in range(world_size):
        options = LoadOptions(rank=rank, world_size=world_size, workers=workers, seed=1, on_bad_sample="skip")
        loader = open_loader(dataset, spec, options)
        for batch in loader.steps(first, 10):
            for part in batch.parts:
                numbers[batch.step - first] += part.batch["number"].tolist()
        replaced += loader.source.num_replaced
        loader.source.close()
    return numbers, replaced


def test_the_same_samples_for_everybody(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opened() -> Any:
        return instep.data.parquet(folder, columns=["number"], cache=tmp_path)

    expected, replaced = load(opened(), 1)
    assert replaced == 14  # 7 samples in each of two epochs
    assert caplog.text.count("is bad, and another is read in its place") == 1
    assert "000.parquet, block 1 (7 rows" in caplog.text
    epoch = sorted(number for batch in expected[:5] for number in batch)
    good = [number for number in range(40) if not 7 <= number < 14]
    assert set(epoch) == set(good)
    # Each of the rows 7 to 13 is replaced by the one 1, 3 or 7 behind it that can be read.
    assert sorted([*good, 14, 15, 16, 17, 14, 15, 14]) == epoch
    for world_size, first, workers in ((2, 0, 0), (3, 4, 0), (2, 3, 2), (1, 0, 1)):
        numbers, replaced = load(opened(), world_size, first, workers)
        assert numbers == expected[first:]
        assert first or replaced == 14


def test_without_it_the_block_is_named(folder: Path, tmp_path: Path) -> None:
    dataset = instep.data.parquet(folder, columns=["number"], cache=tmp_path)
    loader = open_loader(dataset, BatchSpec(seed=1, batch_size=8), LoadOptions(workers=0, seed=1))
    with pytest.raises(BadSample, match=r"000\.parquet, block 1 .*--on-bad-sample skip"):
        list(loader.steps(0, 5))
    with pytest.raises(BadSample):
        first_rows(dataset, 8, None, 0)
    assert first_rows(dataset, 8, None, 0, "skip")[0]["number"].tolist() == [*range(7), 14]


class Images(torch.utils.data.Dataset[Any]):
    """A dataset of a person's own, with some samples that cannot be decoded."""

    def __init__(self, error: Exception, bad: set[int]) -> None:
        self._error, self._bad = error, bad

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            raise self._error
        return {"number": index, "noise": torch.rand(())}


def test_a_dataset_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Images(ValueError("cannot identify image"), {4, 29})
    expected, replaced = load(dataset, 1)
    assert sorted(number for batch in expected[:4] for number in batch) == sorted([*(set(range(30)) - {4, 29}), 5, 0])
    assert "sample 4 is bad" in caplog.text or "sample 29 is bad" in caplog.text
    assert load(dataset, 3)[0] == expected
    assert load(dataset, 1, workers=2) == (expected, replaced)


def test_what_may_pass_is_no_bad_sample() -> None:
    for error in (ConnectionResetError("reset"), TimeoutError("late"), DataError("the storage failed")):
        with pytest.raises(type(error)):
            load(Images(error, {3}), 1)


def test_all_bad() -> None:
    with pytest.raises(DataError, match="none of the samples that would take its place"):
        load(Images(ValueError("no"), set(range(30))), 1)
