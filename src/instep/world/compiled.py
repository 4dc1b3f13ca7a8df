"""Libraries that are compiled from C when instep is installed, if there is a compiler."""

import importlib.machinery
from pathlib import Path


def find_library(stem: Path) -> Path | None:
    """Return the file of a library, by its path without the suffix; None: it was not compiled."""
    paths = (stem.with_name(stem.name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)
