"""The compiled walk through tar headers: what Python finds, or nothing; whatever the bytes are."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sysconfig
import tarfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep
from instep.core.errors import DataError
from instep.data.sources import tar as module
from instep.data.sources import tar_walk
from instep.data.sources.format import FileIndex
from instep.data.sources.source_file import LocalFile
from reading import small_blocks

WALK = tar_walk.find_walk()
needs_walk = pytest.mark.skipif(WALK is None, reason="instep was installed where no compiler is")
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def test_it_was_compiled_where_a_compiler_is() -> None:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))[0]
    assert WALK is not None or shutil.which(compiler) is None


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 5000)
    monkeypatch.setattr(tar_walk, "_WINDOW_BYTES", 4096)


def archive(members: list[tuple[str, int]], fmt: int, mtime: float = 1.5, kinds: bytes = b"") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=fmt) as tar:
        for number, (name, size) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.mtime = mtime if fmt == tarfile.PAX_FORMAT else int(mtime)
            info.size = size
            if number < len(kinds):
                info.type = kinds[number : number + 1]
            with suppress(ValueError):  # a name too long for this format is left out
                tar.addfile(info, io.BytesIO(bytes([number % 256]) * size))
    return content.getvalue()


def indexed(file: LocalFile, names: list[str] | None, monkeypatch: pytest.MonkeyPatch, walk: Any) -> FileIndex | str:
    """Return the index of a file, or what is wrong with it."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_walk", lambda: walk)
        try:
            return module.Tar(names).index_file(file)
        except (ValueError, DataError) as error:
            return str(error)


def samples(file: LocalFile, index: FileIndex, monkeypatch: pytest.MonkeyPatch, walk: Any) -> list[Any]:
    """Return the samples of each block, or what is wrong with it."""
    found: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_walk", lambda: walk)
        for block in index.blocks:
            try:
                found.append([*module.Tar().read_block(file, block)._samples])  # type: ignore[attr-defined]
            except ValueError as error:
                found.append(str(error))
    return found


def compare(path: Path, content: bytes, names: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Check that an archive is read alike with and without the walk; return whether the walk read all of it."""
    assert WALK is not None
    path.write_bytes(content)
    file = LocalFile(path, path.stat())
    expected = indexed(file, names, monkeypatch, None)
    assert indexed(file, names, monkeypatch, WALK) == expected
    plain = WALK.index(file, names)
    if isinstance(expected, str):
        assert plain is None
        return False
    assert plain is None or plain.blocks == list(expected.blocks)
    read = samples(file, expected, monkeypatch, WALK)
    assert read == samples(file, expected, monkeypatch, None)
    assert sum(len(block) for block in read) == sum(block.num_rows for block in expected.blocks)
    walked = [WALK.samples(block.start, file.read(block.start, block.num_bytes)) for block in expected.blocks]
    return plain is not None and None not in walked


NAMES = [
    *(
        ".hidden",
        "a/.b",
        "q/x.y/.c",
        "a.b/.c",
        "k.jpg\n",
        "a.\nb/x.jpg",
        "x.É",
        "é.jpg",
        "é.x/é.jpg",
        "x",
        "x.",
        "b.c/",
        "a.b/c",
    ),
    *("__m__", "__m__/x.jpg", "__x.jpg", "_", "d/__m__.jpg", "x.a.B.c", "/x.jpg", "./x.jpg", "a//x.jpg"),
    *(f"x.{'e' * length}" for length in (30, 31, 32, 33, 60)),
    *(f"{'k' * length}.jpg" for length in (95, 96, 97, 99, 100, 120)),
    *(f"{'d' * 80}/{'e' * 90}.jpg", f"{'d' * 99}/x.jpg"),
]


@needs_walk
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fmt: int) -> None:
    compare(tmp_path / "a.tar", archive([(name, 3)], fmt), None, monkeypatch)
    compare(tmp_path / "a.tar", archive([("b.jpg", 1), (name, 3), ("c.jpg", 3)], fmt), ["jpg"], monkeypatch)


@needs_walk
@pytest.mark.parametrize("count", [61, 62, 63, 70])
def test_many_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    members = [(f"{n}.{extension}", n) for n in range(2) for extension in range(count)]
    assert compare(tmp_path / "a.tar", archive(members, FORMATS[0]), None, monkeypatch) == (count <= 62)
    names = [str(extension) for extension in range(count)]
    compare(tmp_path / "a.tar", archive(members, FORMATS[0]), names, monkeypatch)


@needs_walk
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["jpg", "JSON", "seg.png", "cls", ""]), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([0, 1, 511, 512, 513, 2000, 9000]), min_size=1, max_size=20),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([*NAMES, "0.cls"]), st.sampled_from(b"00\x0071245V")), max_size=2
    ),
    st.sampled_from(FORMATS),
    st.sampled_from([0, 1.5]),
    st.sampled_from([None, ["jpg"], ["cls", "jpg"], ["É"], ["e" * 32], []]),
)
def test_any_members(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    extensions: list[str],
    sizes: list[int],
    others: list[tuple[int, str, int]],
    fmt: int,
    mtime: float,
    names: list[str] | None,
) -> None:
    members = [(f"d/{n}.{extension}", size, 48) for n, size in enumerate(sizes) for extension in extensions]
    for place, name, kind in others:
        members.insert(place, (name, 0 if kind in b"1245" else 700, kind))
    content = archive([member[:2] for member in members], fmt, mtime, bytes(member[2] for member in members))
    compare(tmp_path_factory.mktemp("tar") / "a.tar", content, names, monkeypatch)


@needs_walk
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.integers(0, 12000), st.integers(0, 255)), max_size=4),
    st.booleans(),
    st.integers(0, 12000) | st.none(),
)
def test_damaged_and_truncated_archives(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    fmt: int,
    changes: list[tuple[int, int]],
    is_consistent: bool,
    keep: int | None,
) -> None:
    """`is_consistent`: with checksums that fit again, so that the other fields are what is looked at."""
    content = bytearray(archive([(f"{n}.{ext}", 700 * n) for n in range(3) for ext in ("jpg", "cls")], fmt))
    for place, value in changes:
        content[place % len(content)] = value
        if is_consistent:
            header = place % len(content) // 512 * 512
            content[header + 148 : header + 156] = b" " * 8
            content[header + 148 : header + 156] = b"%06o\0 " % sum(content[header : header + 512])
    compare(tmp_path_factory.mktemp("tar") / "a.tar", bytes(content[:keep]), None, monkeypatch)


@needs_walk
@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([0, 124, 148, 156, 257, 345]), st.binary(max_size=12)), max_size=6
    ),
    st.integers(0, 511),
)
def test_a_block_of_any_bytes(fmt: int, changes: list[tuple[int, int, bytes]], cut: int) -> None:
    """The headers of a block are not checked again: fields may say anything."""
    assert WALK is not None
    content = bytearray(archive([("a.jpg", 600), ("a.cls", 1), ("b.jpg", 0)], fmt))
    for record, place, field in changes:
        content[record * 512 + place : record * 512 + place + len(field)] = field
    data = memoryview(bytes(content[: len(content) - cut]))
    try:
        expected = module._samples_of_block(1024, data)
    except (ValueError, IndexError):
        expected = None
    walked = WALK.samples(1024, data)
    if walked is not None and expected is None:
        with pytest.raises(ValueError, match="two members"):
            list(walked)
    elif walked is not None:
        assert list(walked) == expected


@needs_walk
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1, 3000, 300_000])
def test_plain_archives_are_walked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: int, size: int
) -> None:
    members = [(f"d/{n:03}.{ext}", size) for n in range(40) for ext in ("jpg", "seg.PNG", "cls")]
    assert compare(tmp_path / "a.tar", archive(members, fmt), None, monkeypatch)
    assert compare(tmp_path / "a.tar", archive(members, fmt), ["cls"], monkeypatch)


@needs_walk
def test_the_archives_of_webdataset_are_walked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:05}", "bin": bytes(number), "cls": number})
    assert compare(tmp_path / "a.tar", (tmp_path / "a.tar").read_bytes(), None, monkeypatch)


@needs_walk
def test_a_file_that_has_changed_is_left_to_python(tmp_path: Path) -> None:
    assert WALK is not None
    (tmp_path / "a.tar").write_bytes(archive([("a.jpg", 1)], FORMATS[0]))
    file = LocalFile(tmp_path / "a.tar", (tmp_path / "a.tar").stat())
    assert WALK.index(file, None) is not None
    os.utime(file.path, ns=(1, 1))
    assert WALK.index(file, None) is None
    file.path.unlink()
    assert WALK.index(file, None) is None


@needs_walk
def test_several_threads_index_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, plain = threading.Barrier(2), module.Tar.index_file

    def index_file(self: module.Tar, file: Any) -> FileIndex:
        together.wait(timeout=20)
        return plain(self, file)

    monkeypatch.setattr(module.Tar, "index_file", index_file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(archive([(f"{number}.jpg", 10)], FORMATS[0]))
    dataset = instep.data.tar(tmp_path, cache=tmp_path / "cache")
    assert [dataset[number]["__key__"] for number in range(4)] == ["0", "1", "2", "3"]
