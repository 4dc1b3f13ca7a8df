"""Fixtures of the data room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

_SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The real MNIST files, where they are at hand."""
    folder = _SHARED / "mnist"
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"no MNIST files in {folder}")
    return folder


@pytest.fixture(scope="session")
def shakespeare_file() -> Path:
    """A real text, where it is at hand."""
    file = _SHARED / "tinyshakespeare.txt"
    if not file.is_file():
        pytest.skip(f"no {file}")
    return file
