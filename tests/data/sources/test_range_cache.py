"""The cache of ranges: fetched once by all processes, whole or absent, bounded, and never a reason to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instep.core.errors import DataError
from instep.data.sources.range_cache import RangeCache

SIZE = 10_000
fork = multiprocessing.get_context("fork")


def content(key: str, size: int = SIZE) -> bytes:
    return (key.encode() * size)[:size]


def fetches(log: Path, key: str, delay_s: float = 0.0) -> Callable[[], bytes]:
    """Return a function that fetches an entry, and notes that it did."""

    def fetch() -> bytes:
        with log.open("a") as lines:
            lines.write(f"{key}\n")
        time.sleep(delay_s)
        return content(key)

    return fetch


def used_bytes(cache: RangeCache) -> int:
    return sum(file.stat().st_size for file in (cache.folder / "ranges").rglob("*") if file.is_file())


def entries(folder: Path) -> list[Path]:
    return [file for file in (folder / "ranges").rglob("*") if file.is_file()]


def test_fetched_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        cache = RangeCache(tmp_path / "cache")
        for key in "ab":
            assert cache.read(key, SIZE, fetches(log, key)) == content(key)
    assert log.read_text().split() == ["a", "b"]


def test_what_is_fetched_ahead_is_not_fetched_again(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", RangeCache(tmp_path / "cache")
    cache.fill("a", SIZE, fetches(log, "a"))
    assert cache.read("a", SIZE, fetches(log, "a")) == content("a")
    assert log.read_text().split() == ["a"]


def _read_all(folder: Path, log: Path, seed: int) -> None:
    cache = RangeCache(folder)
    for number in range(20):
        key = f"key {(number * 7 + seed) % 20}"
        assert cache.read(key, SIZE, fetches(log, key.replace(" ", "_"), 0.002)) == content(key.replace(" ", "_"))


def test_processes_fetch_an_entry_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [fork.Process(target=_read_all, args=(tmp_path / "cache", log, seed)) for seed in (0, 0, 1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(log.read_text().split()) == sorted(f"key_{number}" for number in range(20))


def _read_and_die(folder: Path, log: Path) -> None:
    def dies() -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    RangeCache(folder).read("a", SIZE, dies)


def _write_and_die(folder: Path, log: Path) -> None:
    os.rename = os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    RangeCache(folder).read("a", SIZE, fetches(log, "a"))


@pytest.mark.parametrize("target", [_read_and_die, _write_and_die])
def test_killed_in_the_middle(tmp_path: Path, target: Callable[[Path, Path], None]) -> None:
    log = tmp_path / "log"
    process = fork.Process(target=target, args=(tmp_path / "cache", log))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    log.write_text("")
    assert RangeCache(tmp_path / "cache").read("a", SIZE, fetches(log, "a")) == content("a")
    assert log.read_text().split() == ["a"]
    assert len(entries(tmp_path / "cache")) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "zeros"])
def test_a_damaged_entry_is_fetched_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log"
    RangeCache(tmp_path).read("a", SIZE, fetches(log, "a"))
    (file,) = entries(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[500] ^= 4
    damaged = {"flip": whole, "cut": whole[:-1], "empty": b"", "longer": whole + b"1", "zeros": bytes(len(whole))}
    file.write_bytes(damaged[damage])
    assert RangeCache(tmp_path).read("a", SIZE, fetches(log, "a")) == content("a")
    assert log.read_text().split() == ["a", "a"]
    assert RangeCache(tmp_path).read("a", SIZE, fetches(log, "a")) == content("a")
    assert log.read_text().split() == ["a", "a"]


def test_the_least_recently_used_leave(tmp_path: Path) -> None:
    log, bound = tmp_path / "log", 10 * SIZE
    cache = RangeCache(tmp_path, bound)
    held = cache.read("first", SIZE, fetches(log, "first"))
    for number in range(40):
        cache.read(f"{number}", SIZE, fetches(log, f"{number}"))
        assert used_bytes(cache) <= bound + SIZE
        time.sleep(0.002)
    assert held == content("first"), "what is mapped stays, also when its file is gone"
    log.write_text("")
    for number in (39, 38, 37, 36):
        cache.read(f"{number}", SIZE, fetches(log, f"{number}"))
    assert log.read_text() == ""
    cache.read("0", SIZE, fetches(log, "0"))
    assert log.read_text().split() == ["0"]


def _read_many(folder: Path, log: Path, bound: int, seed: int) -> None:
    cache = RangeCache(folder, bound)
    for number in range(60):
        key = f"key{(number * 7 + seed) % 30}"
        assert cache.read(key, SIZE, fetches(log, key)) == content(key)


def test_evicted_while_others_use_them(tmp_path: Path) -> None:
    log, bound = tmp_path / "log", 5 * SIZE
    processes = [fork.Process(target=_read_many, args=(tmp_path, log, bound, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert used_bytes(RangeCache(tmp_path)) <= bound + 4 * SIZE


def test_larger_than_the_cache(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert RangeCache(tmp_path, SIZE // 2).read("a", SIZE, fetches(log, "a")) == content("a")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, cache = tmp_path / "log", RangeCache(small_disk, 1 << 30)
    for number in range(20):
        assert cache.read(f"{number}", SIZE, fetches(log, f"{number}")) == content(f"{number}")
    assert caplog.text.count("No space left") == 1
    assert "cache=FOLDER" in caplog.text
    assert log.read_text().split() == [f"{number}" for number in range(20)], "not fetched twice for the cache"
    assert not [*small_disk.rglob("*.tmp")]
    assert RangeCache(small_disk, 1 << 30).read("0", SIZE, fetches(log, "0")) == content("0")
    assert len(log.read_text().split()) == 20


def test_an_error_of_the_storage_passes_through(tmp_path: Path) -> None:
    def fails() -> bytes:
        raise DataError("no such file")

    with pytest.raises(DataError, match="no such file"):
        RangeCache(tmp_path).read("a", SIZE, fails)
    log = tmp_path / "log"
    assert RangeCache(tmp_path).read("a", SIZE, fetches(log, "a")) == content("a")


def test_a_fork_does_not_keep_a_lock(tmp_path: Path) -> None:
    children = []

    def forks() -> bytes:
        children.append(fork.Process(target=time.sleep, args=(30,)))
        children[0].start()
        return content("a")

    cache = RangeCache(tmp_path)
    cache.read("a", SIZE, forks)
    entries(tmp_path)[0].unlink()
    log = tmp_path / "log"
    other = fork.Process(target=RangeCache(tmp_path).read, args=("a", SIZE, fetches(log, "a")))
    other.start()
    other.join(10)
    try:
        assert other.exitcode == 0
    finally:
        children[0].kill()
        other.kill()
        children[0].join()
        other.join()
