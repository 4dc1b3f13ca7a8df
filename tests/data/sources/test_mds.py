"""MDS: the samples that mosaicml-streaming 0.13.0 wrote (mds_shards), and its own reader where it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep
from instep.core.errors import DataError
from instep.data.sources import mds as module
from instep.data.sources.mds_encodings import find_decoder
from reading import assert_rows, assert_same_batches, small_blocks

SHARDS = Path(__file__).parent / "mds_shards"
"""Written by MDSWriter(size_limit=4096, hashes=["sha1"]), raw and compressed, with the ten samples below."""


def sample(n: int) -> dict[str, Any]:
    dtypes = ["uint8", "int64", "float32", "float16"]
    return {
        "any": np.arange(6 * (n + 1), dtype=dtypes[n % 4]).reshape(2, -1),
        "b": bytes(range(n)),
        "f16": np.float16(n / 2),
        "f32": np.float32(n / 3),
        "f64": np.float64(n / 7),
        "i": -n * 10**12,
        "i16": np.int16(-30000 - n),
        "i32": np.int32(-(2**31) + n),
        "i64": np.int64(-(2**63) + n),
        "i8": np.int8(-n),
        "j": {"n": [n, None, "x"]},
        "s": "é" * n,
        "sd": Decimal(f"{n}.10"),
        "sf": n / 11,
        "shaped": np.full((2, 3), n, "float32"),
        "si": n * 10**30,
        "typed": np.arange(n + 300, dtype="int16"),
        "u16": np.uint16(60000 + n),
        "u32": np.uint32(4 * 10**9 + n),
        "u64": np.uint64(2**63 + n),
        "u8": np.uint8(n),
    }


@pytest.mark.parametrize("kind", ["raw", "zstd", "gz", "bz2"])
@pytest.mark.parametrize("block_bytes", [1, 1500, 1 << 20])
def test_the_samples_of_the_real_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int
) -> None:
    if kind == "zstd":
        pytest.importorskip("zstandard")
    small_blocks(monkeypatch, block_bytes)
    dataset = instep.data.mds(SHARDS / kind, cache=tmp_path)
    assert_rows(dataset, [sample(n) for n in range(10)])
    if kind == "raw":
        for file in dataset.files:
            assert file.path is not None
            shards = module.read_shards("", (SHARDS / kind / "index.json").read_bytes())
            blocks = module.Mds("", shards).index_file(file).blocks
            assert all(a.start + a.num_bytes == b.start for a, b in itertools.pairwise(blocks))
            assert blocks[-1].start + blocks[-1].num_bytes == file.num_bytes


def test_a_batch(tmp_path: Path) -> None:
    batch = instep.data.mds(SHARDS / "raw", cache=tmp_path).rows(torch.tensor([9, 0]))
    assert [row["i"] for row in batch] == [-9 * 10**12, 0]
    folder = write(
        tmp_path / "few",
        {"label": "int", "x": "ndarray:float32:2"},
        [{"label": n, "x": np.full(2, n, "f4")} for n in range(9)],
    )
    columns = instep.data.mds(folder, cache=tmp_path).gather(torch.tensor([8, 0, 3]))
    assert columns["label"].tolist() == [8, 0, 3]
    assert columns["x"].tolist() == [[8, 8], [0, 0], [3, 3]]


def write(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], per_shard: int = 4) -> Path:
    """Write raw shards as the format's description has it, where the real writer is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    sizes = [_SIZES.get(columns[name].partition(":")[0]) for name in names]
    if "ndarray:float32:2" in columns.values():
        sizes = [8 if columns[name].startswith("ndarray") else size for name, size in zip(names, sizes, strict=True)]
    shards = []
    for number, first in enumerate(range(0, len(samples), per_shard)):
        encoded = []
        for each in samples[first : first + per_shard]:
            data = [_encode(columns[name], each[name]) for name in names]
            heads = [len(one) for one, size in zip(data, sizes, strict=True) if size is None]
            encoded.append(np.array(heads, "<u4").tobytes() + b"".join(data))
        config = b'{"the writer": "notes"}'
        offsets = np.cumsum([4 * (len(encoded) + 2) + len(config), *map(len, encoded)]).astype("<u4")
        content = np.uint32(len(encoded)).tobytes() + offsets.tobytes() + config + b"".join(encoded)
        (folder / f"shard.{number:05}.mds").write_bytes(content)
        shards.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": sizes,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": f"shard.{number:05}.mds", "bytes": len(content), "hashes": {}},
                "samples": len(encoded),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


_SIZES = {"int": 8, "uint8": 1, "float32": 4}


def _encode(encoding: str, value: Any) -> bytes:
    if encoding == "int":
        return int(value).to_bytes(8, "little", signed=True)
    if encoding == "str":
        return bytes(value.encode())
    return bytes(value) if encoding in ("bytes", "jpeg") else bytes(value.tobytes())


rows = st.lists(
    st.fixed_dictionaries(
        {"i": st.integers(-(2**63), 2**63 - 1), "s": st.text(max_size=9), "z": st.binary(max_size=30)}
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, st.integers(1, 9), st.sampled_from([1, 60, 10**6]), st.sampled_from([["i"], ["s"], ["i", "s", "z"]]))
def test_any_samples(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    samples: list[dict[str, Any]],
    per_shard: int,
    block_bytes: int,
    names: list[str],
) -> None:
    small_blocks(monkeypatch, block_bytes)
    folder = tmp_path_factory.mktemp("mds")
    samples = [{name: each[name] for name in names} for each in samples]
    encodings = {name: {"i": "int", "s": "str", "z": "bytes"}[name] for name in names}
    write(folder, encodings, samples, per_shard)
    assert_rows(instep.data.mds(folder, cache=folder / "cache"), samples)


def test_the_same_batches_at_any_number_of_ranks_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 60)
    folder = write(tmp_path, {"i": "int", "s": "str"}, [{"i": n, "s": "x" * (n % 7)} for n in range(53)], 11)
    assert_same_batches(instep.data.mds(folder, cache=tmp_path / "cache"), "i", 53)


@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="mosaicml-streaming is not installed")
def test_the_samples_of_the_real_reader(tmp_path: Path) -> None:
    from vision import import_torchvision

    import_torchvision()
    from streaming.base.format import reader_from_json

    shards = json.loads((SHARDS / "raw" / "index.json").read_text())["shards"]
    expected = [row for shard in shards for row in reader_from_json(str(SHARDS / "raw"), None, shard)]
    assert_rows(instep.data.mds(SHARDS / "raw", cache=tmp_path), expected)


@pytest.mark.parametrize(("code", "width"), [(0, 1), (1, 2), (2, 4), (3, 8)])
def test_shapes_of_any_width(code: int, width: int) -> None:
    head = bytes([33, 2 << 2 | code]) + np.array([2, 3], f"<u{width}").tobytes()
    array = find_decoder("", "x", "ndarray")(head + np.arange(6, dtype="<i4").tobytes())
    assert array.dtype == np.int32
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


class TestBadInput:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(SHARDS / "raw", tmp_path / "data"))

    def _edit(self, folder: Path, old: str, new: str) -> None:
        index = folder / "index.json"
        assert old in index.read_text()
        index.write_text(index.read_text().replace(old, new))

    def test_pickles(self, folder: Path) -> None:
        self._edit(folder, '"json"', '"pkl"')
        with pytest.raises(DataError, match=r"index\.json: the column 'j' holds pickles, which can run any program"):
            instep.data.mds(folder, cache=folder)

    def test_unknown_encodings(self, folder: Path) -> None:
        self._edit(folder, '"json"', '"protobuf"')
        with pytest.raises(
            DataError, match=r"the column 'j' has the encoding 'protobuf'\. instep reads bytes, float16"
        ):
            instep.data.mds(folder, cache=folder)

    def test_unknown_compression(self, folder: Path) -> None:
        self._edit(folder, '"compression": null', '"compression": "br:11"')
        with pytest.raises(DataError, match=r"compressed with 'br'\. instep reads zstd, gz and bz2"):
            instep.data.mds(folder, cache=folder)

    def test_another_version(self, folder: Path) -> None:
        self._edit(folder, '"version": 2', '"version": 3')
        with pytest.raises(DataError, match=r"version 3\. Only MDS, version 2"):
            instep.data.mds(folder, cache=folder)

    def test_no_index(self, folder: Path) -> None:
        (folder / "index.json").unlink()
        with pytest.raises(DataError, match=r"index\.json cannot be read: No such file"):
            instep.data.mds(folder, cache=folder)

    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"shards": [{"format": "mds"}]}', '{"shards": []}'])
    def test_no_index_of_shards(self, folder: Path, content: str) -> None:
        (folder / "index.json").write_text(content)
        with pytest.raises(DataError, match=r"index\.json (is no index of MDS shards|lists no shards)"):
            instep.data.mds(folder, cache=folder)

    def test_a_truncated_shard(self, folder: Path) -> None:
        shard = folder / "shard.00001.mds"
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"shard\.00001\.mds has 3554 bytes, and its index\.json says 3555"):
            instep.data.mds(folder, cache=folder)

    def test_a_missing_shard(self, folder: Path) -> None:
        (folder / "shard.00001.mds").unlink()
        with pytest.raises(DataError, match=r"lists shard\.00001\.mds, which the folder does not have"):
            instep.data.mds(folder, cache=folder)

    def test_a_shard_too_many(self, folder: Path) -> None:
        shutil.copy(folder / "shard.00001.mds", folder / "shard.00009.mds")
        with pytest.raises(DataError, match=r"shard\.00009\.mds is not one of the shards"):
            instep.data.mds(folder, cache=folder)

    def test_other_columns_in_another_shard(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        index["shards"][2]["column_names"][0] = "other"
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match=r"shard\.00002\.mds has the columns {'other'"):
            instep.data.mds(folder, cache=folder)

    def test_a_damaged_head(self, folder: Path) -> None:
        shard = folder / "shard.00001.mds"
        shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
        with pytest.raises(
            DataError, match=r"shard\.00001\.mds cannot be read as MDS: its first bytes do not describe"
        ):
            instep.data.mds(folder, cache=folder)

    def test_damaged_sizes(self, folder: Path) -> None:
        shard = folder / "shard.00001.mds"
        content = bytearray(shard.read_bytes())
        first = int.from_bytes(content[4:8], "little")
        content[first] ^= 1
        shard.write_bytes(content)
        dataset = instep.data.mds(folder, cache=folder)
        with pytest.raises(DataError, match=r"shard\.00001\.mds, block 0 .*do not add up"):
            dataset[4]

    def test_a_damaged_compressed_shard(self, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(SHARDS / "gz", tmp_path / "data"))
        shard = folder / "shard.00000.mds.gz"
        content = bytearray(shard.read_bytes())
        content[600] ^= 0xFF
        shard.write_bytes(content)
        dataset = instep.data.mds(folder, cache=tmp_path)
        with pytest.raises(DataError, match=r"shard\.00000\.mds\.gz, block 0"):
            dataset[0]
