"""Parquet: what a sample and a batch look like, and what is said of files that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import instep.data
import patience
from instep.core.errors import BadSample, DataError, SpecError
from instep.data.sources import arrow_rows
from instep.data.sources.format import Block, BlockRows
from instep.data.sources.parquet import Parquet
from instep.data.sources.source_file import SourceFile
from parquet_files import corrupt_row_group, table, write_files

STACKABLE = ["number", "vector", "text", "even"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "files", [20, 0, 33])


def test_batches_and_samples(folder: Path, tmp_path: Path) -> None:
    dataset = instep.data.parquet(folder, columns=STACKABLE, cache=tmp_path)
    assert len(dataset) == 53
    assert dataset.block_sizes is not None
    assert dataset.block_sizes.tolist() == [7, 7, 6, 0, 7, 7, 7, 7, 5]
    numbers = torch.tensor([52, 0, 19, 20, 0, 7])
    batch = dataset.gather(numbers)
    assert list(batch) == STACKABLE
    assert torch.equal(batch["number"], numbers)
    assert torch.equal(batch["vector"], numbers[:, None].expand(6, 4).float())
    assert batch["text"] == [f"row {number}" for number in numbers.tolist()]
    assert batch["even"].dtype == torch.bool
    sample = dataset[-1]
    assert sample["number"].dtype == torch.int64
    assert (int(sample["number"]), sample["text"], sample["vector"].shape) == (52, "row 52", (4,))
    assert [int(row["number"]) for row in dataset.rows(numbers)] == numbers.tolist()
    assert [int(row["number"]) for row in dataset[10:14].rows(torch.arange(4))] == [10, 11, 12, 13]


def test_lists_of_different_lengths_need_a_collate(folder: Path, tmp_path: Path) -> None:
    dataset = instep.data.parquet(folder, cache=tmp_path)
    assert [row["list"].tolist() for row in dataset.rows(torch.tensor([4, 3, 2]))] == [[0], [], [0, 1]]
    assert dataset.gather(torch.tensor([2, 5]))["list"].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(DataError, match=r"'list' has rows of different shapes \(\(0,\), \(1,\)\).*Define collate"):
        dataset.gather(torch.tensor([3, 4]))


def test_blocks_of_a_batch_are_decoded_in_threads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = instep.data.parquet(folder, columns=["number"], cache=tmp_path, memory_bytes=1)
    decode, together, calls = Parquet.read_block, threading.Barrier(2, timeout=60), list[int]()

    def decode_with_another(self: Parquet, file: SourceFile, block: Block) -> BlockRows:
        calls.append(block.number)
        together.wait()
        return decode(self, file, block)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(Parquet, "read_block", decode_with_another)
    numbers = torch.arange(52, -1, -1)
    assert torch.equal(dataset.gather(numbers)["number"], numbers)
    assert len(calls) == 8, "each once, though only one fits into memory"


def test_pandas_is_not_imported(folder: Path, tmp_path: Path) -> None:
    """It takes as long as to decode a hundred row groups, and pyarrow imports it for conversions to NumPy."""
    script = f"""
import sys, torch, instep
dataset = instep.data.parquet({str(folder)!r}, cache={str(tmp_path)!r})
dataset.rows(torch.tensor([1, 50, 2, 5]))
sys.exit("pandas" in sys.modules and "pandas was imported")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60 * patience.PATIENCE)


@settings(deadline=None)
@given(
    st.sampled_from(["int8", "uint8", "int32", "uint64", "float16", "float32", "float64", "bool"]),
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(0, 20),
    st.integers(0, 20),
    st.booleans(),
)
def test_numbers_are_those_of_arrow(kind: str, values: list[int], first: int, count: int, with_nulls: bool) -> None:
    mask = np.array(values, dtype=bool) if with_nulls and "float" in kind else None
    array = pa.array(np.array(values).astype(kind), mask=mask)[first : first + count]
    expected, actual = array.to_numpy(zero_copy_only=False), arrow_rows._numbers(array)
    assert actual.dtype == np.dtype(kind)
    assert np.array_equal(actual, expected, equal_nan="float" in kind)


def test_other_types(tmp_path: Path) -> None:
    columns = {
        "half": np.arange(4, dtype=np.float16),
        "small": pa.array([1, 2, 3, 4], pa.uint8()),
        "holes": pa.array([1.5, None, 3.0, 4.0]),
        "missing": pa.array([1, None, 3, 4]),
        "word": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
        "raw": [b"x", b"yy", b"", b"z"],
        "struct": [{"a": 1}] * 4,
        "flag": [True, False, True, True],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=3)
    batch = instep.data.parquet(tmp_path / "a.parquet", cache=tmp_path).gather(torch.tensor([3, 1, 0]))
    assert batch["half"].dtype == torch.float16
    assert batch["small"].tolist() == [4, 2, 1]
    assert batch["small"].dtype == torch.uint8
    assert torch.isnan(batch["holes"]).tolist() == [False, True, False]
    assert batch["missing"] == [4, None, 1]
    assert batch["word"] == ["b", "b", "a"]
    assert batch["raw"] == [b"z", b"yy", b"x"]
    assert batch["struct"] == [{"a": 1}] * 3
    assert batch["flag"].tolist() == [True, False, True]


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    big = {"number": np.arange(1000), "big": np.random.default_rng(0).random(1000), "last": np.arange(1000)}
    pq.write_table(pa.table(big), tmp_path / "a.parquet", row_group_size=500)
    file = tmp_path / "a.parquet"
    group = pq.ParquetFile(file).metadata.row_group(0).column(1)
    with file.open("r+b") as opened:
        opened.seek(group.dictionary_page_offset or group.data_page_offset)
        opened.write(b"\xff" * group.total_compressed_size)
    rows = torch.arange(10)
    assert torch.equal(instep.data.parquet(file, columns=["last"], cache=tmp_path).gather(rows)["last"], rows)
    with pytest.raises(BadSample):
        instep.data.parquet(file, cache=tmp_path).gather(rows)


class TestBadInput:
    def test_nothing_there(self, tmp_path: Path) -> None:
        for url in (tmp_path, tmp_path / "absent", f"{tmp_path}/*.parquet", []):
            with pytest.raises(DataError, match=r"no files|No such file|No file fits"):
                instep.data.parquet(url, cache=tmp_path)

    def test_an_unknown_column(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"00\d\.parquet has no column 'nubmer'\. It has 'number', 'vector'"):
            instep.data.parquet(folder, columns=["nubmer"], cache=tmp_path)
        with pytest.raises(SpecError, match=r"columns=\['number'\]"):
            instep.data.parquet(folder, columns="number", cache=tmp_path)

    @pytest.mark.parametrize("keep", [0, 5, 200, -1])
    def test_a_truncated_file(self, folder: Path, tmp_path: Path, keep: int) -> None:
        file = folder / "002.parquet"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"002\.parquet cannot be read as Parquet.*Is it truncated"):
            instep.data.parquet(folder, cache=tmp_path)

    def test_not_parquet(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(os.urandom(10_000) + b"PAR1")
        with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
            instep.data.parquet(tmp_path, cache=tmp_path / "cache")

    def test_another_schema(self, folder: Path, tmp_path: Path) -> None:
        other = table(0, 5).set_column(0, "number", pa.array([1.0] * 5)).drop_columns(["text"])
        pq.write_table(other, folder / "003.parquet")
        with pytest.raises(DataError, match=r"000\.parquet and .*003\.parquet cannot be read as one source") as caught:
            instep.data.parquet(folder, cache=tmp_path)
        assert "'number' is int64 in the first and double in the second" in str(caught.value)
        assert "'text' is missing in the second" in str(caught.value)
        assert len(instep.data.parquet(folder, columns=["vector"], cache=tmp_path)) == 58

    def test_a_corrupt_block_is_named(self, folder: Path, tmp_path: Path) -> None:
        corrupt_row_group(folder / "002.parquet", 1)
        dataset = instep.data.parquet(folder, columns=STACKABLE, cache=tmp_path)
        assert len(dataset.gather(torch.arange(27))["number"]) == 27
        for _ in range(2):
            with pytest.raises(BadSample, match=r"002\.parquet, block 1 \(7 rows, bytes \d+ to \d+\), cannot be read"):
                dataset.gather(torch.tensor([3, 27]))

    def test_a_file_that_changes_while_it_is_read(self, folder: Path, tmp_path: Path) -> None:
        dataset = instep.data.parquet(folder, columns=STACKABLE, cache=tmp_path)
        write_files(folder, [40], rows_per_group=9)
        with pytest.raises(DataError, match=r"000\.parquet has changed since this dataset was opened.*start the run"):
            dataset.gather(torch.tensor([3]))
        (folder / "002.parquet").unlink()
        with pytest.raises(DataError, match=r"002\.parquet.*cannot be read: No such file"):
            dataset.gather(torch.tensor([30]))

    def test_no_rows(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="have no rows"):
            instep.data.parquet(write_files(tmp_path / "files", [0, 0]), cache=tmp_path)


def test_row_groups_of_any_size(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files", [50_000], rows_per_group=50_000)
    dataset = instep.data.parquet(folder, columns=STACKABLE, cache=tmp_path, memory_bytes=1)
    rows = torch.randint(0, 50_000, (100,))
    assert torch.equal(dataset.gather(rows)["number"], rows)
