"""Sources in an object store: S3's API on loopback, which answers late and fails at times."""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch

import instep.data
from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions
from instep.data.sources.retry import retrying
from object_store import ObjectStore, serve
from parquet_files import write_files

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(botocore|aiobotocore|s3fs)")
SIZES = [2000, 3000, 2500]
WHOLE = ["number", "vector", "text", "even"]  # the lists between them are read, too, and cannot be stacked


class Remote:
    """Files in a bucket, and the same ones here."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.url = store.upload(folder, "bucket")
        self.num_bytes = sum(file.stat().st_size for file in folder.iterdir())

    def open(self, cache: Path, **more: Any) -> Any:
        options = {"columns": ["number", "text"], "storage_options": self.store.storage_options, "cache": cache} | more
        return instep.data.parquet(options.pop("url", self.url), **options)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    folder = write_files(tmp_path_factory.mktemp("remote") / "files", SIZES, rows_per_group=250)
    (folder / "_hidden.parquet").write_bytes(b"not Parquet")
    with serve() as store:
        yield Remote(store, folder)


@pytest.fixture
def slow(remote: Remote) -> Iterator[Remote]:
    """50 ms until every answer, and 2 % of requests that fail."""
    remote.store.disturb(0.05, 0.02)
    yield remote
    remote.store.disturb(0, 0)


def read_epoch(dataset: Any, workers: int = 0) -> list[int]:
    loader = open_loader(
        dataset, BatchSpec(seed=0, batch_size=100, shuffle_window=1500), LoadOptions(workers=workers, seed=0)
    )
    try:
        return [n for batch in loader.steps(0, 75) for part in batch.parts for n in part.batch["number"].tolist()]
    finally:
        loader.source.close()


def test_read_once_from_a_slow_and_flaky_store(slow: Remote, tmp_path: Path) -> None:
    before = slow.store.counts()
    numbers = read_epoch(slow.open(tmp_path, columns=WHOLE))
    counts = slow.store.counts()
    assert sorted(numbers) == list(range(sum(SIZES)))
    assert numbers == read_epoch(
        instep.data.parquet(slow.folder / "*[0-9].parquet", columns=["number"], cache=tmp_path)
    )
    assert counts["bytes"] - before["bytes"] <= 1.1 * slow.num_bytes
    assert counts["at_once"] >= 4, "blocks are fetched ahead, several at a time"
    assert read_epoch(slow.open(tmp_path, columns=WHOLE), workers=2) == numbers
    assert slow.store.counts()["bytes"] - counts["bytes"] < 0.02 * slow.num_bytes, "it is in the cache"


def _tar(path: Path, numbers: range) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for number in numbers:
            # Some are so large that the index passes over them.
            for suffix, content in (("cls", b"%d" % number), ("bin", bytes(400_000 if number % 40 == 0 else 2000))):
                member = tarfile.TarInfo(f"{number:05}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _json_lines(path: Path, numbers: range) -> None:
    path.with_suffix(".jsonl").write_text("".join(f'{{"cls": {number}, "x": "{"x" * 4000}"}}\n' for number in numbers))


@pytest.mark.parametrize(("open_source", "write"), [(instep.data.tar, _tar), (instep.data.jsonl, _json_lines)])
def test_what_the_index_reads_is_not_read_again(open_source: Any, write: Any, remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / f"once-{write.__name__.strip('_').replace('_', '-')}"
    folder.mkdir()
    for number in range(3):
        write(folder / str(number), range(number * 400, number * 400 + 400))
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    url = remote.store.upload(folder, folder.name)
    before = remote.store.counts()
    dataset = open_source(url, cache=tmp_path / "cache", storage_options=remote.store.storage_options)
    indexed = remote.store.counts()
    numbers = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    assert [row["cls"] for row in dataset.rows(numbers)] == numbers.tolist()
    after = remote.store.counts()
    assert after["bytes"] - before["bytes"] <= 1.1 * num_bytes
    assert after["requests"] - indexed["requests"] <= 2, "the blocks are in the cache"
    cached = sum(file.stat().st_size for file in (tmp_path / "cache" / "ranges").rglob("*") if file.is_file())
    assert cached <= 1.1 * num_bytes


def test_worker_processes_read_it(slow: Remote, tmp_path: Path) -> None:
    expected = read_epoch(slow.open(tmp_path / "a"))
    for workers in (1, 2):
        mapped = slow.open(tmp_path / f"b{workers}").map(lambda sample: sample)
        assert read_epoch(mapped, workers) == expected


def test_without_a_cache_folder(remote: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert sorted(read_epoch(remote.open(tmp_path / "cache"))) == list(range(sum(SIZES)))
    assert caplog.text.count("Data is read without it") == 1


def test_python_s_generator_is_left_alone(slow: Remote, tmp_path: Path) -> None:
    slow.store.disturb(0, 0.3)
    state = random.getstate()
    dataset = slow.open(tmp_path)
    for first in range(0, 7500, 250):
        dataset.gather(torch.arange(first, first + 2))
    assert random.getstate() == state


def test_changed_files(remote: Remote, tmp_path: Path) -> None:
    store = remote.store
    url = store.upload(write_files(tmp_path / "other", [10], rows_per_group=5), "changing")
    dataset = remote.open(tmp_path / "cache", url=url)
    assert len(dataset) == 10
    import s3fs

    write_files(tmp_path / "other", [12], rows_per_group=6)
    s3fs.S3FileSystem(**store.storage_options).put(
        str(tmp_path / "other" / "000.parquet"), "changing/other/000.parquet"
    )
    with pytest.raises(DataError, match=r"s3://changing/other/000\.parquet has changed since this dataset was opened"):
        dataset.gather(torch.arange(10))
    assert len(remote.open(tmp_path / "cache", url=url)) == 12


class _Refuses(BaseHTTPRequestHandler):
    """Answers everything as S3 answers keys that it does not know."""

    def do_GET(self) -> None:
        content = b"<Error><Code>InvalidAccessKeyId</Code><Message>We do not know you.</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_words: Any) -> None:
        """Print nothing."""


@contextmanager
def refusing() -> Iterator[str]:
    """Run a server that refuses everything; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class TestBadInput:
    def test_nothing_there(self, remote: Remote, tmp_path: Path) -> None:
        for url in ("s3://bucket/absent", "s3://absent/files", "s3://bucket/files/*.csv"):
            with pytest.raises(DataError, match=r"no such file|no files"):
                remote.open(tmp_path, url=url)

    def test_wrong_credentials(self, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        options = {"client_kwargs": remote.store.storage_options["client_kwargs"]}
        begun = time.perf_counter()
        with pytest.raises(DataError, match=r"the storage refuses access \(NoCredentialsError.*storage_options"):
            remote.open(tmp_path, storage_options=options)
        assert time.perf_counter() - begun < 5

    def test_refused(self, tmp_path: Path) -> None:
        with refusing() as server:
            keys = {"key": "wrong", "secret": "wrong", "client_kwargs": {"endpoint_url": server}}
            for url, options in {
                f"{server}/a.parquet": None,
                "s3://bucket/a.parquet": keys,
                "s3://bucket/*.parquet": keys,
            }.items():
                with pytest.raises(DataError) as refused:
                    instep.data.parquet(url, cache=tmp_path, storage_options=options)
                assert str(refused.value).startswith(f"{url}: the storage refuses access (")
                assert "Check the credentials" in str(refused.value)

    def test_no_server(self, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("instep.data.sources.retry._FIRST_DELAY_S", 0.001)
        monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
        gone = {**remote.store.storage_options, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
        with pytest.raises(DataError, match=r"s3://bucket/files: the storage failed 8 times in a row"):
            remote.open(tmp_path, storage_options=gone)

    def test_an_unknown_protocol(self, tmp_path: Path) -> None:
        with pytest.raises((DataError, SpecError), match="nowhere://bucket"):
            instep.data.parquet("nowhere://bucket", cache=tmp_path)


def test_other_storages(tmp_path: Path) -> None:
    import fsspec

    folder = write_files(tmp_path / "files", [10, 5])
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/somewhere/files", recursive=True)
    for url in ("memory://somewhere/files", "memory://somewhere/files/*.parquet", f"file://{folder}"):
        dataset = instep.data.parquet(url, columns=["number"], cache=tmp_path / "cache")
        assert dataset.gather(torch.arange(15))["number"].tolist() == list(range(15))


class TestRetries:
    def test_pauses_grow(self) -> None:
        pauses: list[float] = []

        def fails() -> None:
            raise ConnectionResetError("reset")

        with pytest.raises(DataError, match=r"here: the storage failed 8 times in a row, at last with .*reset"):
            retrying("here", fails, pauses.append)
        assert len(pauses) == 7
        assert 0.05 <= pauses[0] <= 0.1
        assert all(later > earlier for earlier, later in zip(pauses, pauses[2:], strict=False))

    @pytest.mark.parametrize(
        ("status", "words"), [(403, "refuses access"), (503, "failed 8 times"), (404, "no such file")]
    )
    def test_the_cause_of_a_file_that_http_does_not_find(self, status: int, words: str) -> None:
        def fails() -> None:
            answer = aiohttp.ClientResponseError(SimpleNamespace(real_url="http://x"), (), status=status)
            raise FileNotFoundError("http://x") from (FileNotFoundError("http://x") if status == 404 else answer)

        with pytest.raises(DataError, match=f"here: .*{words}"):
            retrying("here", fails, lambda _s: None)

    @pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x"), ValueError("x"), KeyError("x")])
    def test_what_stays_wrong_is_said_at_once(self, error: Exception) -> None:
        def fails() -> None:
            raise error

        with pytest.raises(DataError, match=r"here: "):
            retrying("here", fails, lambda _s: pytest.fail("no second try"))
