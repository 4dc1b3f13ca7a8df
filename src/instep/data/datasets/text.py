"""The characters of a text file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from instep.core.errors import DataError
from instep.data.datasets.split import Split, check_split
from instep.data.datasets.windows import Windows, num_windows

_TEST_PART = 10  # the last tenth of the file


class Text(Windows):
    """Next-character samples; `vocabulary[id]` is the character of an id."""

    vocabulary: str


def text(path: str | Path, length: int, split: Split = "train") -> Text:
    """Read a UTF-8 text file as next-character samples; the last tenth of it is the test half.

    A batch is `(x, y)`, both int64 (B, length): ids over the sorted characters of the whole file, so that
    both halves have the same; `.vocabulary` holds the characters.
    """
    check_split(split)
    path = Path(path)
    codes, ids = np.unique(_characters(path), return_inverse=True)
    cut = len(ids) - len(ids) // _TEST_PART
    part = (ids[:cut] if split == "train" else ids[cut:]).astype(np.uint32)
    if not num_windows(len(part), length):
        raise DataError(
            f"{path} has {len(part)} characters for {split}; one sample of length {length} needs "
            f"{length + 1}. Use a longer file or a smaller length."
        )
    found = Text(part, length)
    found.vocabulary = "".join(map(chr, codes))
    return found


def _characters(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    try:
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text file in UTF-8: byte {error.start} ({error.reason}).") from error
    return np.frombuffer(content.encode("utf-32-le"), dtype="<u4")
