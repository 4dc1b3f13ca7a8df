"""Whose code a file is: the person's own, or a library's, Python's or instep's. Pure."""

from __future__ import annotations

import functools
import os
import sysconfig

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder that instep lies in."""
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Tell whether a file is the person's own: not of Python, not of an installed library, not of instep."""
    path = os.path.realpath(filename)
    return not filename.startswith(("<frozen", "<string")) and not path.startswith((PACKAGE, *_LIBRARIES))
