"""Write a report's file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from instep.core.errors import SpecError


def write_text(path: Path, text: str) -> int:
    """Write a file in place of what has its name, at once; return its size. Raise SpecError if it cannot be written."""
    data = text.encode("utf-8", errors="replace")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}. Give another file with -o.") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    return len(data)
