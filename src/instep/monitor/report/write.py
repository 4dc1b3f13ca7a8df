"""Write a report's file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from instep.core.errors import SpecError


def check_writable(path: Path) -> None:
    """Raise SpecError if a file could not be written; to be asked before the work that it is to hold."""
    reason = None
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"there is no directory {path.parent}"
    elif not os.access(path.parent, os.W_OK):
        reason = f"no permission to write to {path.parent}"
    if reason is not None:
        raise SpecError(f"{path} cannot be written: {reason}. Give another file with -o.")


def check_output(path: Path, figures: Sequence[str]) -> None:
    """Raise SpecError for a file that is neither a page nor one of these figures (.svg, …), or could not be written."""
    if path.suffix.lower() not in (".html", ".htm", *figures):
        raise SpecError(
            f"output={path} is neither a page (.html) nor a figure ({', '.join(figures)}). Give one of these endings."
        )
    check_writable(path)


def write_text(path: Path, text: str) -> int:
    """Write a text file in place of what has its name, as `write_bytes` does."""
    return write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, data: bytes) -> int:
    """Write a file in place of what has its name, at once; return its size. Raise SpecError if it cannot be written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    check_writable(path)
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}. Give another file with -o.") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return len(data)
