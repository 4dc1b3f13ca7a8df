"""Whose code a file is: the user's, or that of a library, Python or instep. Pure."""

import functools
import os
import sysconfig

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of instep."""
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not part of Python, an installed library or instep."""
    path = os.path.realpath(filename)
    return not filename.startswith(("<frozen", "<string")) and not path.startswith((PACKAGE, *_LIBRARIES))
