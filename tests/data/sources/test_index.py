"""The index of a source: built once, by all who come together, and only as long as it fits."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import instep.data
from instep.data.sources.format import Block, FileIndex
from instep.data.sources.index_file import IndexEntry, read_entries, write_entries
from instep.data.sources.parquet import Parquet
from parquet_files import write_files


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were indexed."""
    names: list[str] = []
    plain = Parquet.index_file

    def index_file(self: Parquet, file: Any) -> FileIndex:
        names.append(Path(file.url).name)
        return plain(self, file)

    monkeypatch.setattr(Parquet, "index_file", index_file)
    return names


def test_only_what_changed_is_indexed_again(tmp_path: Path, indexed: list[str]) -> None:
    folder = write_files(tmp_path / "files", [10, 10, 10])
    assert len(instep.data.parquet(folder, cache=tmp_path)) == 30
    assert sorted(indexed) == ["000.parquet", "001.parquet", "002.parquet"]
    indexed.clear()
    assert len(instep.data.parquet(folder, cache=tmp_path)) == 30
    assert indexed == []
    write_files(folder, [10, 12])
    os.utime(folder / "000.parquet", ns=(1, 1))
    assert len(instep.data.parquet(folder, cache=tmp_path)) == 32
    assert sorted(indexed) == ["000.parquet", "001.parquet"]
    assert not [*(tmp_path / "index").glob("*.part*")]
    indexed.clear()
    write_files(tmp_path / "more", [5])
    (tmp_path / "more" / "000.parquet").rename(folder / "009.parquet")
    assert len(instep.data.parquet(folder, cache=tmp_path)) == 37
    assert len(instep.data.parquet(f"{folder}/00[12].parquet", cache=tmp_path)) == 22
    assert indexed == ["009.parquet"]


def test_a_damaged_index_is_built_again(tmp_path: Path, indexed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    folder = write_files(tmp_path / "files", [10])
    instep.data.parquet(folder, cache=tmp_path)
    file = next((tmp_path / "index").glob("*.index"))
    content = bytearray(file.read_bytes())
    content[-30] ^= 1
    file.write_bytes(content)
    assert len(instep.data.parquet(folder, cache=tmp_path)) == 10
    assert indexed == ["000.parquet"] * 2
    assert "is damaged" in caplog.text
    instep.data.parquet(folder, cache=tmp_path)
    assert len(indexed) == 2


@given(
    st.lists(
        st.tuples(st.text(), st.lists(st.tuples(*[st.integers(0, 2**62)] * 3), max_size=4), st.none() | st.text()),
        max_size=5,
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[tuple[int, int, int]], str | None]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.index"
    entries = [
        IndexEntry(url, 3, "v", FileIndex([Block(n, *block, meta) for n, block in enumerate(blocks)], {"a": meta}))
        for url, blocks, meta in files
    ]
    write_entries(path, entries)
    read = read_entries(path)
    assert [entry[:3] for entry in read] == [entry[:3] for entry in entries]
    for actual, expected in zip(read, entries, strict=True):
        assert actual.content.schema == expected.content.schema
        assert list(actual.content.blocks) == list(expected.content.blocks)


def test_beside_the_data(tmp_path: Path, indexed: list[str]) -> None:
    folder = write_files(tmp_path / "files", [10])
    for cache in ("one", "two"):
        instep.data.parquet(folder, cache=tmp_path / cache, index=folder / "_index")
    assert indexed == ["000.parquet"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("not a folder")
    folder = write_files(tmp_path / "files", [10])
    with caplog.at_level(logging.WARNING, "instep.data"):
        dataset = instep.data.parquet(folder, columns=["number"], cache=tmp_path / "cache")
    assert dataset.gather(torch.arange(10))["number"].tolist() == list(range(10))
    assert "The index cannot be kept" in caplog.text


def _open(folder: Path, cache: Path, log: Path, barrier: Any) -> None:
    plain = Parquet.index_file

    def slowly(self: Parquet, file: Any) -> FileIndex:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()} {Path(file.url).name}\n")
        time.sleep(0.02)
        return plain(self, file)

    Parquet.index_file = slowly  # type: ignore[method-assign]
    barrier.wait()
    assert len(instep.data.parquet(folder, cache=cache)) == 60


def test_processes_share_the_work(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files", [3] * 20)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(3)
    log = tmp_path / "log"
    processes = [fork.Process(target=_open, args=(folder, tmp_path, log, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    # Who looks for the last part after the whole was written finds it there.
    assert sorted(name for _, name in lines) == [f"{number:03}.parquet" for number in range(20)]
    assert len({pid for pid, _ in lines}) == 3


def test_a_hundred_thousand_blocks_load_at_once(tmp_path: Path) -> None:
    blocks = [Block(number, 10_000, number, 10) for number in range(100)]
    schema = {f"column {number}": "int64" for number in range(20)}
    entries = [
        IndexEntry(f"s3://bucket/{number:05}.parquet", 9, "tag", FileIndex(blocks, schema)) for number in range(1000)
    ]
    write_entries(tmp_path / "index", entries)
    begun = time.process_time()  # of the processor: a busy machine may take longer
    read = read_entries(tmp_path / "index")
    assert time.process_time() - begun < 0.2
    assert sum(int(np.sum(entry.content.blocks.numbers[:, 0])) for entry in read) == 10**9  # type: ignore[attr-defined]
    assert read[7].content.blocks[3] == blocks[3]
    assert read[7].content.schema == schema
