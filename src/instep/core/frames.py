"""Whose code a file is: the user's, or that of a library, Python or instep. Pure."""

import contextlib
import functools
import glob
import os
import sys
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
    return not _INSTALLED.intersection(path.split(os.sep)) and not _is_listed(path)


def _is_listed(path: str) -> bool:
    """Return whether a folder of `sys.path` has the file's package with a list of what was installed."""
    for entry in sys.path:
        root = os.path.realpath(entry or os.curdir) + os.sep
        if path.startswith(root) and path.removeprefix(root).partition(os.sep)[0] in _packages_in(root):
            return True
    return False


@functools.lru_cache(maxsize=256)
def _packages_in(folder: str) -> frozenset[str]:
    """Return the names that the installed packages of a folder have there: `pip install --target` lists its files."""
    names: set[str] = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError), open(record, encoding="utf-8", errors="replace") as lines:
            names |= {line.partition(",")[0].partition("/")[0] for line in lines}
    return frozenset(names)
