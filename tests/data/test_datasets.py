"""The datasets that come with instep, and files that are not what they should be."""

from __future__ import annotations

import gzip
import hashlib
import struct
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import instep.data
from instep.core.errors import DataError, SpecError
from instep.data.datasets import mnist as mnist_module
from instep.data.datasets.mnist import read_idx

# --- digits ------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns() -> None:
    bundled = pytest.importorskip("sklearn.datasets").load_digits()
    in_test = np.arange(1797) % 5 == 0
    for split, chosen in (("train", ~in_test), ("test", in_test)):
        data = instep.data.digits(split)
        x, y = data.gather(torch.arange(len(data)))
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert np.array_equal(x.numpy() * 16, bundled.data[chosen])
        assert np.array_equal(y.numpy(), bundled.target[chosen])
    assert (len(instep.data.digits("train")), len(instep.data.digits("test"))) == (1437, 360)


def test_a_sample_can_be_looked_at() -> None:
    data = instep.data.digits("test")
    x, y = data[3]
    assert x.shape == (64,)
    assert y.shape == ()
    assert torch.equal(data[-1][0], data[359][0])
    with pytest.raises(IndexError, match="sample 360 of 360"):
        data[360]
    assert len(list(data)) == 360


@pytest.mark.parametrize("slice_", [slice(100), slice(5, 50, 3), slice(None, None, -1), slice(-7, None), slice(9, 9)])
def test_a_slice_is_a_dataset(slice_: slice) -> None:
    whole = instep.data.digits("test")
    part = whole[slice_]
    expected = range(len(whole))[slice_]
    assert len(part) == len(expected)
    for own, there in zip(range(len(part)), expected, strict=True):
        assert torch.equal(part[own][0], whole[there][0])
    indices = torch.arange(len(part))
    assert torch.equal(part.gather(indices)[1], whole.gather(torch.tensor(list(expected), dtype=torch.int64))[1])


def test_an_unknown_split_is_refused() -> None:
    for make in (instep.data.digits, instep.data.mnist, lambda split: instep.data.text("file", 8, split)):
        with pytest.raises(SpecError, match="split='valid' is unknown"):
            make("valid")


def test_the_public_names_are_there() -> None:
    assert instep.data.__all__ == sorted(instep.data.__all__)
    for name in instep.data.__all__:
        assert callable(getattr(instep.data, name))
    assert dir(instep.data) == instep.data.__all__
    assert set(instep.__all__) <= set(dir(instep))
    with pytest.raises(AttributeError, match="nonsense"):
        instep.data.nonsense  # noqa: B018


# --- MNIST -------------------------------------------------------------------------------------------------


def test_mnist_is_read(mnist_folder: Path) -> None:
    data = instep.data.mnist("test", root=mnist_folder)
    assert len(data) == 10_000
    x, y = data.gather(torch.tensor([0, 9999, 5]))
    assert (x.shape, x.dtype) == ((3, 1, 28, 28), torch.float32)
    assert (y.dtype, y.tolist()) == (torch.int64, [7, 6, 1])
    assert x.min() == 0
    assert x.max() == 1
    raw = gzip.decompress((mnist_folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    expected = torch.frombuffer(bytearray(raw[16 : 16 + 784]), dtype=torch.uint8).to(torch.float32) / 255
    assert torch.equal(x[0].flatten(), expected)


def test_the_known_checksums_are_those_of_the_real_files(mnist_folder: Path) -> None:
    for name, sha256 in mnist_module._SHA256.items():
        content = gzip.decompress((mnist_folder / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == sha256


def idx(shape: tuple[int, ...], data: bytes | None = None, magic: bytes | None = None) -> bytes:
    magic = bytes([0, 0, 8, len(shape)]) if magic is None else magic
    data = bytes(i % 10 for i in range(int(np.prod(shape)))) if data is None else data
    return magic + struct.pack(f">{len(shape)}I", *shape) + data


def write_mnist(folder: Path, images: bytes, labels: bytes) -> Path:
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return folder


def test_mnist_may_be_gzipped_or_not(tmp_path: Path) -> None:
    data = instep.data.mnist("train", root=write_mnist(tmp_path, idx((3, 28, 28)), idx((3,))))
    x, y = data.gather(torch.tensor([2, 0]))
    assert y.tolist() == [2, 0]
    assert torch.equal(x[1].flatten() * 255, torch.arange(784) % 10)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            idx((3, 28, 28))[:-5],
            idx((3,)),
            r"images.* truncated: .* 3 × 28 × 28 = 2352 bytes of data, 2347 found",
        ),
        (idx((3, 28, 28)) + b"x", idx((3,)), r"images.* too long: .* = 2352 bytes of data, more found"),
        (idx((3, 28, 28))[:9], idx((3,)), r"ends within its header: 16 bytes expected, 9 found"),
        (b"", idx((3,)), r"begins with 0x, not with 0x00000803"),
        (idx((3,)), idx((3,)), r"begins with 0x00000801, not with 0x00000803"),
        (idx((3, 28, 28), magic=b"\0\0\x0d\3"), idx((3,)), r"begins with 0x00000d03"),
        (idx((2**32 - 1, 2**31, 28), data=b"few"), idx((3,)), r"truncated: .* 3 found"),
        (idx((3, 27, 28)), idx((3,)), r"images of 27×28, not 28×28"),
        (idx((3, 28, 28)), idx((4,)), r"3 images and .* 4 labels"),
        (idx((3, 28, 28)), idx((3,), b"\1\2\x0a"), r"label 10; the digits are 0 to 9"),
    ],
)
def test_wrong_idx_files_are_refused(tmp_path: Path, images: bytes, labels: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        instep.data.mnist("train", root=write_mnist(tmp_path, images, labels))


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_damaged_gzip_files_are_refused(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()))
    packed = bytearray(gzip.compress(idx((5000,), data=bytes(packed[:5000]))))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed = bytearray(b"<html>not found</html>")
    file = tmp_path / "labels.gz"
    file.write_bytes(packed)
    with pytest.raises(DataError, match=r"labels\.gz is not a complete gzip file"):
        read_idx(file, 1)


def test_a_folder_without_mnist_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither train-images-idx3-ubyte nor .*gz\. Put MNIST's four files there"):
        instep.data.mnist("train", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Reply:
    """What a mirror sends."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> bytes:
        return self.content


def test_missing_files_are_downloaded_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"t10k-images-idx3-ubyte": idx((3, 28, 28)), "t10k-labels-idx1-ubyte": idx((3,))}
    monkeypatch.setattr(mnist_module, "_SHA256", {n: hashlib.sha256(c).hexdigest() for n, c in files.items()})
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> Reply:
        asked.append(url)
        if url.startswith(mnist_module._MIRRORS[0]):
            return Reply(gzip.compress(b"something else"))
        return Reply(gzip.compress(files[url.rsplit("/", 1)[1].removesuffix(".gz")]))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert len(instep.data.mnist("test")) == 3
    assert len(asked) == 4
    assert all(url.startswith("https://") for url in asked)
    assert len(instep.data.mnist("test")) == 3
    assert len(asked) == 4
    names = sorted(path.name for path in (tmp_path / ".cache" / "instep" / "mnist").iterdir())
    assert names == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]


def test_without_a_network_it_says_where_to_put_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*_: Any, **__: Any) -> Reply:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(DataError, match=r"\.cache/instep/mnist and could not be downloaded .*no network.*Put its four"):
        instep.data.mnist("train")


# --- tokens and text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(("count", "samples"), [(12, 2), (11, 2), (10, 1), (6, 1)])
def test_tokens_are_windows_of_the_file(tmp_path: Path, dtype: str, count: int, samples: int) -> None:
    values = np.arange(count, dtype=dtype) + np.iinfo(dtype).max - 100  # large ones must not turn negative
    values.tofile(tmp_path / "tokens")
    data = instep.data.tokens(tmp_path / "tokens", length=5, dtype=dtype)
    assert len(data) == samples
    x, y = data.gather(torch.arange(samples).flip(0))
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    for row, sample in enumerate(reversed(range(samples))):
        assert x[row].tolist() == values[sample * 5 : sample * 5 + 5].tolist()
        assert y[row].tolist() == values[sample * 5 + 1 : sample * 5 + 6].tolist()


def test_wrong_token_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"12345")
    with pytest.raises(DataError, match="5 bytes, which is not a multiple of the 2 bytes of a token"):
        instep.data.tokens(file, 4)
    file.write_bytes(b"12345678")
    with pytest.raises(DataError, match="4 tokens; one sample of length 4 needs 5"):
        instep.data.tokens(file, 4)
    assert len(instep.data.tokens(file, 3)) == 1
    file.write_bytes(b"")
    with pytest.raises(DataError, match="0 tokens"):
        instep.data.tokens(file, 3)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        instep.data.tokens(tmp_path / "absent", 3)
    with pytest.raises(SpecError, match=r"dtype='float32'.*uint16"):
        instep.data.tokens(file, 3, dtype="float32")
    with pytest.raises(SpecError, match="length=0"):
        instep.data.tokens(file, 0)


def test_text_is_ids_over_the_files_characters(tmp_path: Path) -> None:
    content = "añ€😀\r\n" * 20
    (tmp_path / "text").write_bytes(content.encode())
    train, test = (instep.data.text(tmp_path / "text", 4, split) for split in ("train", "test"))
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(content)))
    for data, part in ((train, content[:108]), (test, content[108:])):
        assert len(data) == (len(part) - 1) // 4
        for sample in range(len(data)):
            x, y = data[sample]
            assert "".join(data.vocabulary[i] for i in x.tolist()) == part[sample * 4 : sample * 4 + 4]
            assert "".join(data.vocabulary[i] for i in y.tolist()) == part[sample * 4 + 1 : sample * 4 + 5]


def test_a_real_text(shakespeare_file: Path) -> None:
    data = instep.data.text(shakespeare_file, 64)
    assert len(data.vocabulary) == 65
    assert data.gather(torch.arange(3))[0].shape == (3, 64)


def test_wrong_text_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abc\xff")
    with pytest.raises(DataError, match="not a UTF-8 text file: byte 3"):
        instep.data.text(file, 2)
    file.write_text("short")
    with pytest.raises(DataError, match="0 characters for test; one sample of length 2 needs 3"):
        instep.data.text(file, 2, "test")
    with pytest.raises(DataError, match="cannot be read"):
        instep.data.text(tmp_path, 2)
