"""MNIST, the handwritten digits of 28×28 pixels, from its four idx files.

The idx format is a big-endian header, then bytes:
0x00 0x00  type (0x08: unsigned bytes)  number of dimensions  |  one uint32 per dimension  |  the bytes
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import struct
import tempfile
import urllib.request
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError
from instep.data.dataset import BatchDataset, Split, check_split

_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_TIMEOUT_S = 20
_CHUNK_BYTES = 1 << 20
_SHA256 = {  # of the uncompressed files: mirrors may compress them differently
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def mnist(split: Split = "train", root: str | Path | None = None) -> Mnist:
    """Load MNIST: 60000 digits to train on, 10000 to test on.

    A batch is `(x, y)`: x float32 (B, 1, 28, 28) in 0..1; y int64 (B,), the digit. In memory the images stay
    bytes. Files in `root` may be gzipped or not; without `root`, files missing from the cache
    (~/.cache/instep/mnist) are downloaded into it and their checksums verified.
    """
    check_split(split)
    prefix = "train" if split == "train" else "t10k"
    folder = Path.home() / ".cache" / "instep" / "mnist" if root is None else Path(root)
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    return Mnist(*(_obtain(folder, name, download=root is None) for name in names))


class Mnist(BatchDataset):
    """Images and labels of one split of MNIST."""

    is_thread_safe = True

    def __init__(self, images_file: Path, labels_file: Path) -> None:
        images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
        if images.shape[1:] != (28, 28):
            raise DataError(f"{images_file} holds images of {images.shape[1]}×{images.shape[2]}, not 28×28, pixels.")
        if len(images) != len(labels):
            raise DataError(
                f"{images_file} holds {len(images)} images and {labels_file} {len(labels)} labels: they do "
                f"not belong together. Download both again."
            )
        if len(labels) and labels.max() > 9:
            raise DataError(f"{labels_file} holds the label {labels.max()}; the digits are 0 to 9.")
        self._images = torch.from_numpy(images).reshape(len(images), 1, 28, 28)
        self._labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these images, scaled to 0..1, and their labels."""
        images = self._images.index_select(0, indices).to(torch.float32).div_(255)
        return images, self._labels.index_select(0, indices)


def _obtain(folder: Path, name: str, *, download: bool) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    if not download:
        raise DataError(
            f"{folder} has neither {name} nor {name}.gz. Put MNIST's four files there ({', '.join(_SHA256)}; "
            f"gzipped or not), or leave out root to download them."
        )
    failures = []
    for mirror in _MIRRORS:
        try:
            return _download(f"{mirror}{name}.gz", folder / f"{name}.gz", _SHA256[name])
        except (OSError, http.client.HTTPException, EOFError, zlib.error, DataError) as error:
            failures.append(f"{mirror}: {error}")
    raise DataError(
        f"MNIST is not in {folder} and could not be downloaded ({'; '.join(failures)}). Put its four files "
        f"there ({', '.join(_SHA256)}; gzipped or not), or give their folder as root."
    )


def _download(url: str, target: Path, sha256: str) -> Path:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - always one of _MIRRORS
        packed = response.read()
    digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
    if digest != sha256:
        raise DataError(f"{url} has the SHA-256 {digest}, not {sha256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: other ranks may look for it, or download it, at the same time.
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
        file.write(packed)
    os.replace(file.name, target)
    return target


def read_idx(path: Path, num_dims: int) -> npt.NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, gzipped if its suffix is .gz; raise DataError unless it is exactly right."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(path, file, num_dims)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}). Download it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse(path: Path, file: BinaryIO, num_dims: int) -> npt.NDArray[np.uint8]:
    header_bytes = 4 + 4 * num_dims
    header = file.read(header_bytes)
    magic = bytes([0, 0, 8, num_dims])
    if header[:4] != magic:
        raise DataError(
            f"{path} begins with 0x{header[:4].hex()}, not with 0x{magic.hex()}: it is not an idx file of "
            f"unsigned bytes in {num_dims} dimension{'s' if num_dims > 1 else ''}. Is it another file?"
        )
    if len(header) < header_bytes:
        raise DataError(f"{path} ends within its header: {header_bytes} bytes expected, {len(header)} found.")
    shape = struct.unpack(f">{num_dims}I", header[4:])
    expected = math.prod(shape)
    data = bytearray()  # in chunks: a wrong size in the header must not make us allocate that much memory
    while len(data) <= expected and (chunk := file.read(min(_CHUNK_BYTES, expected + 1 - len(data)))):
        data += chunk
    if len(data) != expected:
        problem, num_bytes = ("truncated", len(data)) if len(data) < expected else ("too long", "more")
        raise DataError(
            f"{path} is {problem}: its header says {' × '.join(map(str, shape))} = {expected} bytes of data, "
            f"{num_bytes} found. Download it again."
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
