"""WebDataset's tar shards: the samples of tarfile and of webdataset itself, by index."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep
from instep.core.errors import DataError
from instep.data.sources import scan
from instep.data.sources import tar as module
from reading import assert_rows, assert_same_batches, small_blocks

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 5000)
    for name in ("LEAST_BYTES", "MOST_BYTES", "PASSED_OVER_BYTES"):
        monkeypatch.setattr(scan, name, 1500)


def write(path: Path, members: list[tuple[str, bytes]], fmt: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=fmt) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def webdataset_samples(path: Path) -> list[dict[str, Any]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with path.open("rb") as stream:
        samples = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))
    return [{key: value for key, value in sample.items() if key != "__url__"} for sample in samples]


names = st.lists(
    st.tuples(
        st.sampled_from(
            ["", "a/", "./", "b.c/", "long" * 30 + "/", "é/", "__meta__/", "d" * 80 + "/" + "e" * 90 + "/"]
        ),
        st.sampled_from(["x", "yy", "z" * 120, "__m__", "noext", "é"]),
    ),
    min_size=1,
    max_size=12,
    unique=True,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names, st.sampled_from(FORMATS[1:]), st.data())
def test_the_samples_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[str, str]], fmt: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tar")
    members = []
    for number, (parent, stem) in enumerate(keys):
        size = data.draw(st.sampled_from([0, 1, 511, 512, 513, 3000]))
        if stem == "noext":
            members.append((f"{parent}{stem}", b"ignored"))
            continue
        members.append((f"{parent}{stem}.JPG", bytes([number]) * size))
        members.append((f"{parent}{stem}.seg.png", b"p" * number))
    path = write(folder / "a.tar", [("folder.x/", b""), *members], fmt)
    expected = webdataset_samples(path)
    if not expected:
        with pytest.raises(DataError, match="no rows"):
            instep.data.tar(path, cache=folder)
        return
    assert_rows(instep.data.tar(path, cache=folder), expected)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_kind_of_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, is_compiled: bool
) -> None:
    """Old archives have a zero for the kind of a regular file."""
    if not is_compiled:
        monkeypatch.setattr(module, "find_walk", lambda: None)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.jpg", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, 3
            archive.addfile(info, io.BytesIO(b"jpg"))
    assert_rows(instep.data.tar(tmp_path / "a.tar", cache=tmp_path), webdataset_samples(tmp_path / "a.tar"))


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_decoded(tmp_path: Path, fmt: int) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6.0).reshape(2, 3))
    members = [
        ("k0.txt", "é".encode()),
        ("k0.cls", b"7\n"),
        ("k0.json", b'{"a": [1]}'),
        ("k0.npy", array.getvalue()),
        ("k0.depth.npy", array.getvalue()),
        ("k0.jpg", b"\xff\xd8"),
    ]
    dataset = instep.data.tar(write(tmp_path / "a.tar", members, fmt), cache=tmp_path / "cache")
    sample = dataset[0]
    assert (sample["__key__"], sample["txt"], sample["cls"], sample["json"]) == ("k0", "é", 7, {"a": [1]})
    assert sample["npy"].tolist() == sample["depth.npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sample["jpg"] == b"\xff\xd8"
    batch = dataset.gather(torch.tensor([0, 0]))
    assert batch["cls"].tolist() == [7, 7]
    assert batch["npy"].shape == (2, 2, 3)


def _shards(folder: Path, *counts: int) -> Path:
    folder.mkdir(exist_ok=True)
    first = 0
    for shard, count in enumerate(counts):
        members = []
        for number in range(first, first + count):
            members += [(f"{number:04}.cls", str(number).encode()), (f"{number:04}.bin", os.urandom(number * 10))]
        write(folder / f"{shard:03}.tar", members, FORMATS[shard % 3])
        first += count
    return folder


def test_blocks_cover_the_members(tmp_path: Path) -> None:
    dataset = instep.data.tar(_shards(tmp_path / "data", 60), cache=tmp_path / "cache")
    blocks = list(module.Tar().index_file(dataset.files[0]).blocks)
    assert len(blocks) > 5
    with tarfile.open(dataset.files[0].path) as archive:
        last = archive.getmembers()[-1]
    assert blocks[0].start == 0
    assert all(a.start + a.num_bytes == b.start for a, b in itertools.pairwise(blocks))
    assert blocks[-1].start + blocks[-1].num_bytes == last.offset_data + -(-last.size // 512) * 512
    assert all(block.num_bytes <= 5000 or block.num_rows == 1 for block in blocks)


def test_the_same_batches_at_any_number_of_ranks_and_workers(tmp_path: Path) -> None:
    dataset = instep.data.tar(_shards(tmp_path / "data", 31, 17, 5), cache=tmp_path / "cache")
    assert_same_batches(dataset, "cls", 53)


def _digit(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": sample["cls"] * 2}


def test_mapped_samples_are_the_same_too(tmp_path: Path) -> None:
    dataset = instep.data.tar(_shards(tmp_path / "data", 20, 5), cache=tmp_path / "cache").map(_digit)
    assert_same_batches(dataset, "number", 25)


class TestBadInput:
    def test_a_missing_member(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2"), ("c.jpg", b"3")])
        with pytest.raises(
            DataError, match=r"a\.tar: the sample 'b' at byte 2048 has no member .* 'cls', only \['jpg'\]"
        ):
            instep.data.tar(path, cache=tmp_path)
        assert_rows(
            instep.data.tar(path, members=["jpg"], cache=tmp_path),
            [{"__key__": key, "jpg": data} for key, data in (("a", b"1"), ("b", b"2"), ("c", b"3"))],
        )

    def test_a_member_too_many(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("b.cls", b"3")])
        with pytest.raises(DataError, match="the sample 'b' at byte 1024 also has a member with the extension 'cls'"):
            instep.data.tar(path, cache=tmp_path)

    def test_other_members_in_another_file(self, tmp_path: Path) -> None:
        write(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.cls", b"1")])
        write(tmp_path / "b.tar", [("b.jpg", b"1")])
        with pytest.raises(DataError, match=r"a\.tar and .*b\.tar cannot be read as one source: 'cls' is missing"):
            instep.data.tar(tmp_path, cache=tmp_path / "cache")

    @pytest.mark.parametrize("keep", [1000, 1024, 1100, 1536, 2560])
    def test_truncated(self, tmp_path: Path, keep: int) -> None:
        path = write(tmp_path / "a.tar", [("a.jpg", b"x" * 700), ("b.jpg", b"y" * 700)])
        content = path.read_bytes()
        path.write_bytes(content[:keep])
        with pytest.raises(DataError, match=r"a\.tar cannot be read as tar: .*truncated"):
            instep.data.tar(path, cache=tmp_path)

    def test_a_damaged_header(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.tar", [("a.jpg", b"x"), ("b.jpg", b"y"), ("c.jpg", b"z")])
        content = bytearray(path.read_bytes())
        content[1024] ^= 1  # the name of b: to tarfile, the archive ends here
        path.write_bytes(content)
        with pytest.raises(DataError, match="there is no tar header at byte 1024"):
            instep.data.tar(path, cache=tmp_path)

    def test_compressed(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("a.jpg"))
        with pytest.raises(DataError, match="compressed archive"):
            instep.data.tar(tmp_path / "a.tar", cache=tmp_path)

    def test_no_tar_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(b"{}" * 1000)
        with pytest.raises(DataError, match=r"a\.tar cannot be read as tar: there is no tar header at byte 0"):
            instep.data.tar(tmp_path / "a.tar", cache=tmp_path)

    @pytest.mark.parametrize(
        ("name", "data"),
        [("a.cls", b"seven"), ("a.json", b"{"), ("a.txt", b"\xff"), ("a.npy", b"\x93NUMPY"), ("a.npy", b"")],
    )
    def test_members_that_cannot_be_decoded(self, tmp_path: Path, name: str, data: bytes) -> None:
        dataset = instep.data.tar(write(tmp_path / "s.tar", [(name, data)]), cache=tmp_path)
        with pytest.raises(DataError, match=rf"s\.tar, row 0 of block 0 .*the member '{name}' is no"):
            dataset[0]

    def test_pickles_are_refused(self, tmp_path: Path) -> None:
        array = io.BytesIO()
        np.save(array, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        dataset = instep.data.tar(write(tmp_path / "s.tar", [("a.npy", array.getvalue())]), cache=tmp_path)
        with pytest.raises(DataError, match="allow_pickle"):
            dataset[0]

    def test_one_extension_twice(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.JPG", b"1")])
        with pytest.raises(DataError, match="the sample 'a' has two members with the extension 'jpg'"):
            instep.data.tar(path, cache=tmp_path)


def test_json_lists_and_large_members(tmp_path: Path) -> None:
    data = json.dumps(list(range(5000))).encode()
    path = write(tmp_path / "a.tar", [(f"{n}.json", data) for n in range(4)])
    assert_rows(
        instep.data.tar(path, cache=tmp_path), [{"__key__": str(n), "json": list(range(5000))} for n in range(4)]
    )
