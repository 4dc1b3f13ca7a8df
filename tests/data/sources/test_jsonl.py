"""JSON lines: the values of the json module, by index."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep
from instep.core.errors import DataError
from instep.data.sources import jsonl as module
from reading import assert_rows, assert_same_batches

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
blank = st.sampled_from(["", " ", "\t", "\r", "  \r"])
lines = st.lists(st.one_of(objects.map(json.dumps), blank), min_size=1, max_size=40)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 100)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_the_rows_of_the_json_module(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], newline: str, ends: bool, packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    expected = [json.loads(text) for text in texts if text.strip()]
    content = (newline.join(texts) + (newline if ends else "")).encode()
    path = folder / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    if not expected:
        with pytest.raises(DataError, match="no rows"):
            instep.data.jsonl(path, cache=folder)
        return
    dataset = instep.data.jsonl(path, cache=folder)
    assert_rows(dataset, expected)
    # A second time: by the index that the first one wrote.
    assert_rows(instep.data.jsonl(path, cache=folder), expected)


def _write(folder: Path, *counts: int) -> Path:
    first = 0
    for number, count in enumerate(counts):
        rows = [{"id": first + row, "x": row / 3, "text": "é" * (row % 50)} for row in range(count)]
        (folder / f"part-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += count
    return folder


def test_blocks_cover_the_file(tmp_path: Path) -> None:
    dataset = instep.data.jsonl(_write(tmp_path, 200), cache=tmp_path / "cache")
    file = dataset.files[0]
    blocks = module.JsonLines().index_file(file).blocks
    assert blocks[0].start == 0
    assert all(a.start + a.num_bytes == b.start for a, b in itertools.pairwise(blocks))
    assert blocks[-1].start + blocks[-1].num_bytes == file.num_bytes
    assert len(blocks) > 50
    assert max(block.num_bytes for block in blocks) <= 400  # some lines are longer than a block should be


def test_a_batch(tmp_path: Path) -> None:
    dataset = instep.data.jsonl(_write(tmp_path, 30, 30), cache=tmp_path / "cache")
    batch = dataset.gather(torch.tensor([45, 2, 31, 2]))
    assert batch["id"].tolist() == [45, 2, 31, 2]
    assert batch["x"].dtype == torch.float64
    assert batch["text"] == ["é" * 15, "éé", "é", "éé"]


def test_the_same_batches_at_any_number_of_ranks_and_workers(tmp_path: Path) -> None:
    assert_same_batches(instep.data.jsonl(_write(tmp_path, 31, 17, 5), cache=tmp_path / "cache"), "id", 53)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": {n}}}\n' for n in range(50)) + '\n{"a": 1\n[1, 2]\n')
    dataset = instep.data.jsonl(path, cache=tmp_path / "cache")
    assert dataset[49] == {"a": 49}
    with pytest.raises(DataError, match=r"a\.jsonl, row .* line 52 is not JSON: Expecting ','"):
        dataset[50]
    with pytest.raises(DataError, match=r"a\.jsonl, row .* line 53 is a JSON list, not an object"):
        dataset[51]


def test_names_that_differ_within_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"b": 1}\n')
    dataset = instep.data.jsonl(path, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"names \['a'\] and \['b'\]"):
        dataset.gather(torch.arange(2))
    assert dataset.rows(torch.arange(2)) == [{"a": 1}, {"b": 1}]


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read as jsonl: .*end"):
        instep.data.jsonl(path, cache=tmp_path / "cache")


def test_numbers_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1180591620717411303424}\n{"a": 1}\n')
    batch: Any = instep.data.jsonl(path, cache=tmp_path / "cache").gather(torch.arange(2))
    assert batch["a"] == [2**70, 1]
