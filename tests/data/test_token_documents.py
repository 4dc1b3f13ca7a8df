"""Token files: several as one dataset, behind URLs, and documents whose borders count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import instep
from instep.core.errors import DataError, SpecError
from instep.data.sources import tokens as remote

sizes = st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(lambda sizes: max(sizes) > 1)


def _write(path: Path, values: Any, dtype: str = "uint16") -> Path:
    np.asarray(values, dtype=dtype).tofile(path)
    return path


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.integers(1, 9))
def test_no_sample_holds_tokens_of_two_documents(
    tmp_path_factory: pytest.TempPathFactory, document_sizes: list[int], length: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    tokens = 1 + np.arange(sum(document_sizes))
    ends = np.cumsum(document_sizes)
    data = instep.data.tokens(_write(folder / "t.bin", tokens), length, documents=ends)
    x, y = data.gather(torch.arange(len(data)))
    expected_x, expected_y = [], []
    for document in np.split(tokens, ends[:-1]):
        for first in range(0, len(document) - 1, length):
            inputs, targets = document[:-1][first : first + length], document[1:][first : first + length]
            missing = length - len(inputs)
            expected_x.append([*inputs.tolist(), *[0] * missing])
            expected_y.append([*targets.tolist(), *[-100] * missing])
    assert x.tolist() == expected_x
    assert y.tolist() == expected_y
    # Every target once, in any order of reading.
    assert data.padding_share == pytest.approx((y == -100).float().mean().item())
    order = torch.randperm(len(data))
    assert torch.equal(data.gather(order)[1], y[order])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.integers(1, 9))
def test_samples_that_cross_tell_their_documents_apart(
    tmp_path_factory: pytest.TempPathFactory, document_sizes: list[int], length: int
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "t.bin"
    tokens = 1 + np.arange(sum(document_sizes))
    if len(tokens) <= length:
        return
    _write(path, tokens)
    document_of = np.repeat(np.arange(len(document_sizes)), document_sizes)
    plain = instep.data.tokens(path, length)
    data = instep.data.tokens(path, length, documents=np.cumsum(document_sizes), cross=True)
    x, y, document = data.gather(torch.arange(len(data)))
    assert torch.equal(x, plain.gather(torch.arange(len(plain)))[0])
    places = x - 1
    ends_there = document_of[places.numpy()] != document_of[places.numpy() + 1]
    assert torch.equal(y, torch.where(torch.from_numpy(ends_there), -100, x + 1))
    own = torch.from_numpy(document_of)[places]
    assert torch.equal(document, own - own[:, :1])


def test_the_token_that_ends_a_document(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.bin", [5, 6, 7, 0, 8, 0, 0, 9, 3])
    by_token = instep.data.tokens(path, 2, eod=0)
    by_ends = instep.data.tokens(path, 2, documents=[4, 6, 7, 9])
    np.save(tmp_path / "ends.npy", np.array([4, 6, 7, 9]))
    by_file = instep.data.tokens(path, 2, documents=tmp_path / "ends.npy")
    everything = [data.gather(torch.arange(len(data))) for data in (by_token, by_ends, by_file)]
    assert everything[0][0].tolist() == [[5, 6], [7, 0], [8, 0], [9, 0]]
    assert everything[0][1].tolist() == [[6, 7], [0, -100], [0, -100], [3, -100]]
    for x, y in everything[1:]:
        assert torch.equal(x, everything[0][0])
        assert torch.equal(y, everything[0][1])


def test_several_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    files = [
        _write(tmp_path / "a.bin", np.arange(11)),
        _write(tmp_path / "b.bin", np.arange(2)),  # no sample of 5 tokens
        _write(tmp_path / "more" / "c.tokens", np.arange(100, 117)),
    ]
    for paths in (files, [tmp_path, tmp_path / "more"], [str(file) for file in files]):
        data = instep.data.tokens(paths, 5)
        x, y = data.gather(torch.tensor([4, 0, 3, 1, 2]))
        assert x[:, 0].tolist() == [110, 0, 105, 5, 100]
        assert torch.equal(y, x + 1)
    data = instep.data.tokens(files, 5, eod=105)
    x, y = data.gather(torch.arange(len(data)))
    assert x[:, 0].tolist() == [0, 5, 0, 100, 106, 111]
    assert y[3].tolist() == [101, 102, 103, 104, 105]


@pytest.fixture
def memory_files() -> Any:
    filesystem = fsspec.filesystem("memory")
    for name, values in (("a", np.arange(61)), ("b", np.arange(200, 230))):
        filesystem.pipe(f"/tokens/{name}.bin", values.astype("<u2").tobytes())
    yield "memory://tokens"
    filesystem.rm("/tokens", recursive=True)


def test_behind_a_url(tmp_path: Path, memory_files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 50)
    here = [_write(tmp_path / "a.bin", np.arange(61)), _write(tmp_path / "b.bin", np.arange(200, 230))]
    local, data = instep.data.tokens(here, 7), instep.data.tokens(memory_files, 7, cache=tmp_path / "cache")
    assert len(data) == len(local) == 12
    assert data.block_sizes is not None
    assert data.block_sizes.tolist() == [3, 3, 2, 3, 1]
    order = torch.randperm(12)
    for ours, theirs in zip(data.gather(order), local.gather(order), strict=True):
        assert ours.dtype == torch.int64
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)
    assert torch.equal(data.rows(order)[2][1], local.gather(order)[1][2])


class TestBadInput:
    def test_documents_that_do_not_fit(self, tmp_path: Path) -> None:
        path = _write(tmp_path / "t.bin", np.arange(10))
        with pytest.raises(DataError, match=r"last document of .*t\.bin ends at token 9, and the file has 10"):
            instep.data.tokens(path, 2, documents=[4, 9])
        with pytest.raises(DataError, match=r"Document 1 of .*t\.bin ends at token 3, before it begins"):
            instep.data.tokens(path, 2, documents=[4, 3, 10])
        with pytest.raises(DataError, match=r"are float64 of shape \(1,\)"):
            instep.data.tokens(path, 2, documents=np.array([10.0]))
        with pytest.raises(DataError, match=r"ends\.npy cannot be read as a \.npy file"):
            instep.data.tokens(path, 2, documents=tmp_path / "ends.npy")
        with pytest.raises(SpecError, match="Give one of them"):
            instep.data.tokens(path, 2, documents=[10], eod=0)
        with pytest.raises(SpecError, match="the ends of 1 files, and there are 2 token files"):
            instep.data.tokens([path, path], 2, documents=[10])

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        path = _write(tmp_path / "t.bin", [1, 0, 1, 0])
        with pytest.raises(DataError, match="no file has a sample of length 5"):
            instep.data.tokens([path, path], 5)
        with pytest.raises(DataError, match=r"no files that end with \.bin or \.tokens"):
            (tmp_path / "empty").mkdir()
            instep.data.tokens(tmp_path / "empty", 5)
        with pytest.raises(DataError, match="no file has a sample of length 5"):
            instep.data.tokens(_write(tmp_path / "e.bin", [0, 0, 0]), 5, eod=0)

    def test_options_that_have_no_effect(self, tmp_path: Path, memory_files: str) -> None:
        path = _write(tmp_path / "t.bin", np.arange(10))
        with pytest.raises(SpecError, match="cache_bytes: only URLs have such options"):
            instep.data.tokens(path, 5, cache_bytes=10)
        with pytest.raises(SpecError, match="need files of this machine"):
            instep.data.tokens(memory_files, 5, eod=0)
        with pytest.raises(SpecError, match="length=0"):
            instep.data.tokens(memory_files, 0)

    def test_half_a_token(self, tmp_path: Path) -> None:
        filesystem = fsspec.filesystem("memory")
        filesystem.pipe("/half/a.bin", b"123")
        with pytest.raises(DataError, match=r"a\.bin has 3 bytes, which is not a multiple of the 2 bytes of a token"):
            instep.data.tokens("memory://half", 1, cache=tmp_path)
        filesystem.rm("/half", recursive=True)
