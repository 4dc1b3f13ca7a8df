"""Next-token samples: windows of long sequences of tokens, for instance of memory-mapped files of token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from instep.core.errors import DataError, SpecError
from instep.data.dataset import BatchDataset
from instep.data.datasets.token_documents import Documents, DocumentWindows, document_ends
from instep.data.datasets.token_files import TokenFiles
from instep.data.sources.storage import is_remote
from instep.data.sources.tokens import SUFFIXES, open_remote_tokens

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Windows(BatchDataset):
    """Sample i starts at token i * length; y is x shifted by one token.

    A batch is `(x, y)`, both int64 (B, length). Tokens at the end that do not fill a sample are left out.
    """

    is_thread_safe = True

    def __init__(self, tokens: npt.NDArray[Any], length: int) -> None:
        # A view: the last token of each window is the first of the next. A memory map stays on disk.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        self.sample_tokens = length

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return these windows."""
        rows = self._windows[indices.numpy()]
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def check_length(source: str, num_tokens: int, length: int) -> None:
    """Raise unless there is at least one sample, which needs one token more than its length, as the last target."""
    if length < 1:
        raise SpecError(f"length={length} is not possible: a sample needs at least 1 token.")
    if num_tokens <= length:
        raise DataError(
            f"{source}; one sample of length {length} needs {length + 1}. Use a longer file or a smaller length."
        )


def tokens(
    path: Paths,
    length: int,
    dtype: str = "uint16",
    *,
    documents: Any = None,
    eod: int | None = None,
    cross: bool = False,
    **remote: Any,
) -> BatchDataset:
    """Open files of raw little-endian token ids as next-token samples.

    A batch is `(x, y)`, both int64 (B, length): sample i starts at token i * length, y is x shifted by one
    token. Only the samples of a batch are read from disk. `path` is a file, a folder, URLs, or a list of these, each
    file cut by itself; `remote`: what else the other sources take, for URLs.

    `documents`: where each document ends, in tokens, as an array or a .npy file, or a list with one for each file;
    or `eod`: the token that ends each. Then no sample holds tokens of two documents: each document is cut by itself,
    and its last sample padded, with targets of -100. With `cross`, samples are cut as without documents, the target
    of a document's last token is -100, and a batch is `(x, y, document)`: the number, from 0 in each row, of the
    document that each token belongs to.
    """
    if dtype not in _DTYPES:
        raise SpecError(f"dtype={dtype!r} is not a dtype of token ids. Choose one of {', '.join(_DTYPES)}.")
    item = np.dtype(dtype).newbyteorder("<")
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    has_documents = documents is not None or eod is not None
    if any(is_remote(os.fspath(each)) for each in paths):
        if has_documents:
            raise SpecError("documents= and eod= need files of this machine: copy the token files here first.")
        check_length("", max(1, length) + 1, length)
        return open_remote_tokens(paths, length, item, remote)
    if remote:
        raise SpecError(f"{', '.join(remote)}: only URLs have such options, and {path} lies on this machine.")
    files = _find_files(paths)
    if not has_documents:
        if len(files) == 1:
            return Windows(_map(files[0], item, length), length)
        maps = [_map(file, item, length, may_be_short=True) for file in files]
        return _join(paths, length, [Windows(each, length) for each in maps if len(each) > length])
    maps = [_map(file, item, length, may_be_short=not cross) for file in files]
    ends = document_ends(files, maps, documents, eod)
    kind = DocumentWindows if cross else Documents
    return _join(paths, length, [kind(each, end, length) for each, end in zip(maps, ends, strict=True)])


def _join(paths: list[Any], length: int, parts: Sequence[BatchDataset]) -> BatchDataset:
    parts = [part for part in parts if len(part)]
    if not parts:
        names = ", ".join(map(str, paths))
        raise DataError(f"{names}: no file has a sample of length {length}. Use longer files or a smaller length.")
    return parts[0] if len(parts) == 1 else TokenFiles(parts)


def _find_files(paths: list[Any]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        in_folder = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not in_folder:
            raise DataError(f"The folder {path} has no files that end with {' or '.join(SUFFIXES)}.")
        files += in_folder
    return files


def _map(path: Path, item: np.dtype[Any], length: int, may_be_short: bool = False) -> npt.NDArray[Any]:
    """Map a file of tokens into memory."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes % item.itemsize:
            raise DataError(
                f"{path} has {num_bytes} bytes, which is not a multiple of the {item.itemsize} bytes of a token "
                f"({item.name}). Is it truncated, or of another dtype?"
            )
        count = num_bytes // item.itemsize
        if not may_be_short or length < 1:
            check_length(f"{path} holds {count} tokens", count, length)
        return np.memmap(path, dtype=item, mode="r") if count else np.empty(0, item)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
