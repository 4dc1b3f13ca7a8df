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
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, also those that this Python only borrows: the system's, the user's, by a .pth file."""


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not part of Python, an installed library or instep."""
    path = os.path.realpath(filename)
    if filename.startswith(("<frozen", "<string")) or path.startswith((PACKAGE, *_LIBRARIES)):
        return False
    return not _INSTALLED.intersection(path.split(os.sep))
