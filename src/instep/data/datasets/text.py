"""The characters of a text file."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError
from instep.data.dataset import Split, check_split
from instep.data.datasets.tokens import Windows, check_length

_TEST_PART = 10  # the last tenth of the file


class Text(Windows):
    """Next-character samples; `vocabulary[id]` is the character of an id."""

    def __init__(self, ids: npt.NDArray[np.uint32], length: int, vocabulary: str) -> None:
        super().__init__(ids, length)
        self.vocabulary = vocabulary


def text(path: str | Path, length: int, split: Split = "train") -> Text:
    """Read a UTF-8 text file as next-character samples; its last tenth is the test split.

    A batch is `(x, y)`, both int64 (B, length): ids of the sorted characters of the whole file, so that
    both splits have the same ids; `.vocabulary` holds the characters.
    """
    check_split(split)
    path = Path(path)
    codes, ids = np.unique(_characters(path), return_inverse=True)
    cut = len(ids) - len(ids) // _TEST_PART
    part = (ids[:cut] if split == "train" else ids[cut:]).astype(np.uint32)
    check_length(f"{path} has {len(part)} characters for {split}", len(part), length)
    return Text(part, length, "".join(map(chr, codes)))


def _characters(path: Path) -> npt.NDArray[np.uint32]:
    try:
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a UTF-8 text file: byte {error.start} ({error.reason}).") from error
    return np.frombuffer(content.encode("utf-32-le"), dtype="<u4")
