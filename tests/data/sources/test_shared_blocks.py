"""Decoded blocks in shared memory: decoded once a machine, the same rows as alone, whatever is killed or damaged."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import instep.data
from instep.core.errors import BadSample
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_chunks, open_loader
from instep.data.loader import LoadOptions
from instep.data.sources import folder_cache, shared_blocks
from instep.data.sources.jsonl import JsonLines
from instep.data.sources.mds import CompressedMds
from instep.data.sources.parquet import Parquet
from instep.data.sources.shared_blocks import SharedBlocks
from instep.world import shared_memory
from parquet_files import corrupt_row_group, write_files

SIZES, GROUP = [40, 33], 5
NUM_BLOCKS = 8 + 7
COLUMNS = ["number", "vector", "text", "even"]
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Share blocks in a folder of this test, however little decoding its small blocks costs."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)
    monkeypatch.setattr(shared_blocks, "_LEARN_BLOCKS", 10**9)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_files(tmp_path / "files", SIZES, GROUP)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each block that a process of this test decodes."""
    log = tmp_path / "decoded"
    log.touch()
    for kind, name in ((Parquet, "_read_table"), (CompressedMds, "decode_block")):
        decode = getattr(kind, name)

        def noted(self: Any, file: Any, block: Any, decode: Callable[..., Any] = decode) -> Any:
            with log.open("a") as lines:
                lines.write(f"{Path(file.url).name}:{block.number}\n")
            return decode(self, file, block)

        monkeypatch.setattr(kind, name, noted)
    return log


def decoded(log: Path) -> Counter[str]:
    return Counter(log.read_text().split())


def opened(files: Path, cache: Path, columns: list[str] | None = None) -> Any:
    return instep.data.parquet(files, columns or COLUMNS, cache=cache)


def shared(files: Path, cache: Path, columns: list[str] | None = None) -> Any:
    dataset = opened(files, cache, columns)
    dataset.share_blocks(2)
    return dataset


def all_rows(dataset: Any) -> list[Any]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}
        for row in dataset.rows(torch.arange(len(dataset)))
    ]


def run(*functions: Callable[[], None]) -> list[int | None]:
    """Run functions at the same time, each in a process; return how they exited."""
    processes = [fork.Process(target=function) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def read_epoch(
    dataset: Any, rank: int, world_size: int, workers: int, window: int | None, local_world_size: int | None = None
) -> list[list[int]]:
    """Return the numbers of a rank's batches of an epoch; without a window, of an evaluation."""
    options = LoadOptions(rank=rank, world_size=world_size, local_world_size=local_world_size, workers=workers, seed=3)
    if window is None:
        return [batch["number"].tolist() for batch, _ in open_chunks(dataset, 4, options).read()]
    loader = open_loader(dataset, BatchSpec(seed=3, batch_size=12, shuffle_window=window), options)
    try:
        steps = loader.steps(0, loader.num_steps(1))
        return [part.batch["number"].tolist() for step in steps for part in step.parts]
    finally:
        loader.source.close()


def plus_nothing(sample: Any) -> Any:
    return {"number": sample["number"]}


@pytest.mark.parametrize(
    ("world_size", "workers", "window"), [(2, 0, 20), (3, 0, None), (2, 2, 20), (1, 2, 20), (2, 0, 10**6)]
)
def test_decoded_once_a_machine(
    world_size: int, workers: int, window: int | None, files: Path, tmp_path: Path, log: Path
) -> None:
    """Ranks and their worker processes, in a shuffle and in an evaluation, give the batches that each reads alone."""
    cache = tmp_path / "cache"
    own = opened(files, cache).map(plus_nothing)
    alone = [read_epoch(own, rank, world_size, 0, window, local_world_size=1) for rank in range(world_size)]
    log.write_text("")
    met = fork.Barrier(world_size)

    def rank_reads(rank: int) -> Callable[[], None]:
        def read() -> None:
            met.wait(60)
            dataset = opened(files, cache).map(plus_nothing)
            (tmp_path / f"rank-{rank}").write_text(json.dumps(read_epoch(dataset, rank, world_size, workers, window)))
            met.wait(60)  # the first to leave must not be the only one that was there

        return read

    assert run(*map(rank_reads, range(world_size))) == [0] * world_size
    assert [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(world_size)] == alone
    counts = decoded(log)
    assert len(counts) == NUM_BLOCKS
    assert set(counts.values()) == {1}, counts


def test_one_process_shares_nothing(files: Path, tmp_path: Path, memory: Path) -> None:
    for workers in (0, 1):
        dataset = opened(files, tmp_path / "cache").map(plus_nothing)
        read_epoch(dataset, 0, 1, workers, 20)
        assert not list(memory.iterdir())


def odd_tables() -> dict[str, Any]:
    numbers = np.arange(40)
    return {
        "number": numbers,
        "nulls": pa.array([None if number % 3 else number / 7 for number in numbers.tolist()], pa.float32()),
        "integers": pa.array([None if number % 5 else number for number in numbers.tolist()]),
        "list": [list(range(number % 4)) for number in numbers.tolist()],
        "names": pa.array([f"name {number % 3}" for number in numbers.tolist()]).dictionary_encode(),
        "bytes": [bytes([number]) * number for number in numbers.tolist()],
        "struct": [{"a": number, "b": None} for number in numbers.tolist()],
        "flag": pa.array([None if number == 7 else number % 2 == 0 for number in numbers.tolist()]),
    }


def write_gz(folder: Path) -> Path:
    folder.mkdir()
    for number in range(3):
        lines = "".join(json.dumps({"id": number * 10 + line, "text": "é" * line}) + "\n\n" for line in range(10))
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def write_odd(folder: Path) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(odd_tables()), folder / "a.parquet", row_group_size=7)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "mds"])
def test_the_same_rows_as_alone(kind: str, tmp_path: Path) -> None:
    """Every type of column, and the formats that are decompressed, by who decodes a block and by who maps it."""
    folder = tmp_path / "files"
    shards = Path(__file__).parent / "mds_shards" / "gz"
    open_source = {
        "parquet": lambda: instep.data.parquet(write_odd(folder) if not folder.exists() else folder, cache=tmp_path),
        "jsonl.gz": lambda: instep.data.jsonl(write_gz(folder) if not folder.exists() else folder, cache=tmp_path),
        "mds": lambda: instep.data.mds(shards, cache=tmp_path),
    }[kind]
    alone, writer, reader = open_source(), open_source(), open_source()
    every = torch.arange(len(alone))
    expected = repr((alone.rows(every), alone.gather(every) if kind == "jsonl.gz" else None))
    for dataset in (writer, reader):
        dataset.share_blocks(2)
        assert repr((dataset.rows(every), dataset.gather(every) if kind == "jsonl.gz" else None)) == expected
    assert len(list((tmp_path / "shm").glob("*/blocks/*/*"))) == len(alone.block_sizes)


def dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["decoding", "writing", "renaming"])
def test_the_writer_is_killed(
    when: str, files: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock is kept, and no half block is read; what the killed process left goes with the folder."""
    monkeypatch.setattr(shared_blocks, "_WAIT_S", 100.0)
    expected = all_rows(opened(files, tmp_path / "cache"))
    dataset = shared(files, tmp_path / "cache")

    def read_and_die() -> None:
        with pytest.MonkeyPatch.context() as patched:
            if when == "decoding":
                patched.setattr(Parquet, "decode_block", dies)
            elif when == "writing":
                write = folder_cache._write_all
                patched.setattr(folder_cache, "_write_all", lambda file, piece: (write(file, piece[:9]), dies()))
            else:
                patched.setattr(Path, "rename", dies)
            dataset.rows(torch.arange(1))

    assert run(read_and_die) == [-signal.SIGKILL]
    log.write_text("")
    begun = time.monotonic()
    assert all_rows(dataset) == expected
    assert time.monotonic() - begun < 50
    assert set(decoded(log).values()) == {1}
    dataset._shared._shared.close()
    assert not list((tmp_path / "shm").iterdir())


def test_a_stopped_writer_is_not_waited_for(
    files: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "_WAIT_S", 0.1)
    expected = all_rows(opened(files, tmp_path / "cache"))
    dataset, locked = shared(files, tmp_path / "cache"), fork.Event()

    def stop() -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Parquet, "decode_block", lambda *_: (locked.set(), time.sleep(60)))
            dataset.rows(torch.arange(1))

    process = fork.Process(target=stop)
    process.start()
    try:
        assert locked.wait(30)
        begun = time.monotonic()
        assert all_rows(dataset) == expected
        assert time.monotonic() - begun < 20
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_shared_memory_is_full(
    code: int,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = all_rows(opened(files, tmp_path / "cache"))
    dataset = shared(files, tmp_path / "cache")
    write, num_written = folder_cache._write_all, [0]

    def write_all(file: int, piece: Any) -> None:
        num_written[0] += 1
        if num_written[0] > 20:
            raise OSError(code, os.strerror(code))
        write(file, piece)

    monkeypatch.setattr(folder_cache, "_write_all", write_all)
    monkeypatch.setattr(folder_cache, "_FULL_AGAIN_S", 0.0)
    assert all_rows(dataset) == expected
    assert caplog.text.count("Each process of this machine decodes its own blocks") == 1
    assert ("--shm-size" in caplog.text) == (code == errno.ENOSPC)
    assert not list((tmp_path / "shm").rglob("*.tmp"))


def test_what_others_need_of_the_memory_stays_free(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were removed from the folder take memory as long as a process has them mapped."""
    dataset = shared(files, tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=usage.free // 2 - 10**6))
    assert dataset.rows(torch.arange(1))
    assert not list((tmp_path / "shm").glob("*/blocks/*/*"))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zeros"])
def test_a_damaged_block_is_decoded_again(damage: str, files: Path, tmp_path: Path, log: Path) -> None:
    expected = all_rows(opened(files, tmp_path / "cache"))
    dataset = shared(files, tmp_path / "cache")
    assert run(lambda: all_rows(dataset) and None) == [0]
    entries = list((tmp_path / "shm").glob("*/blocks/*/*"))
    assert len(entries) == NUM_BLOCKS
    for entry in entries:
        whole = bytearray(entry.read_bytes())
        whole[len(whole) // 2] ^= 4
        entry.write_bytes({"flip": whole, "cut": whole[:-1], "empty": b"", "zeros": bytes(len(whole))}[damage])
    log.write_text("")
    assert all_rows(dataset) == expected
    assert set(decoded(log).values()) == {1}
    log.write_text("")
    assert all_rows(shared(files, tmp_path / "cache")) == expected
    assert not decoded(log)


def test_a_bad_block_is_named_as_alone(files: Path, tmp_path: Path) -> None:
    corrupt_row_group(files / "000.parquet", 2)
    with pytest.raises(BadSample) as alone:
        opened(files, tmp_path / "cache").rows(torch.arange(sum(SIZES)))
    with pytest.raises(BadSample) as together:
        shared(files, tmp_path / "cache").rows(torch.arange(sum(SIZES)))
    assert str(together.value) == str(alone.value)


def test_bounded(files: Path, tmp_path: Path) -> None:
    """The oldest blocks are removed, also while they are in use."""
    expected = all_rows(opened(files, tmp_path / "cache"))
    most = 6_000
    dataset = instep.data.parquet(files, COLUMNS, cache=tmp_path / "cache", memory_bytes=most)
    dataset.share_blocks(2)
    for _ in range(2):
        assert all_rows(dataset) == expected
        kept = sum(entry.stat().st_size for entry in (tmp_path / "shm").glob("*/blocks/*/*"))
        assert 0 < kept <= most


def test_shared_only_while_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = tmp_path / "real"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)

    def costly() -> list[memoryview]:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return [memoryview(b"few bytes")]

    def cheap() -> list[memoryview]:
        return [memoryview(bytes(4 << 20))]

    for decode, num_processes, pays in ((costly, 2, True), (cheap, 2, False), (costly, 1, False)):
        blocks = SharedBlocks(f"{decode.__name__}{num_processes}", 1 << 30)
        blocks.num_processes = num_processes
        for block in range(8):
            blocks.read(block, decode, wait=True)
        assert blocks.pays == pays, (decode, num_processes)


def test_other_files_and_columns_are_other_blocks(files: Path, tmp_path: Path) -> None:
    kept = [shared(files, tmp_path / "cache"), shared(files, tmp_path / "cache", ["number"])]
    for dataset in kept:
        all_rows(dataset)
    os.utime(files / "000.parquet", ns=(1, 1))
    kept.append(shared(files, tmp_path / "cache"))
    all_rows(kept[-1])
    assert len(list((tmp_path / "shm").iterdir())) == 3
    assert not JsonLines().shares_blocks(kept[0].files[0])
