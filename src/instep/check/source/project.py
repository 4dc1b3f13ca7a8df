"""Which files of a script are read: the script, and what it imports from its own project. No package that is installed.

The project of a script is the nearest folder above it that says so (pyproject.toml, setup.py, .git), or its own folder.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from instep.check.source.module import SourceModule
from instep.core.errors import SpecError
from instep.core.frames import is_users

_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_MAX_FILES = 500
_FOREIGN = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


def project_of(script: Path) -> Path:
    """Return the folder of a script's project."""
    folder = script.resolve().parent
    for parent in (folder, *folder.parents):
        if any((parent / mark).exists() for mark in _MARKS):
            return parent
    return folder


def read_project(script: Path, imported: Iterable[str] = ()) -> list[SourceModule]:
    """Read a script and what it imports from its project, the script first; `imported`: files that a run has imported.

    A file other than the script that cannot be parsed is left out: it was not imported, or failed by itself. Names are
    absolute, as a traceback has them, and symbolic links are kept: so they are those of the observations.
    """
    script, root = Path(os.path.abspath(script)), project_of(script)
    modules = {script.resolve(): SourceModule.read(script)}
    waiting = [Path(os.path.abspath(file)) for file in imported]
    waiting += _imports(modules[script.resolve()], script, root)
    while waiting and len(modules) < _MAX_FILES:
        path = waiting.pop(0)
        key = path.resolve()
        if key in modules or not key.is_relative_to(root) or not _is_own(path):
            continue
        try:
            modules[key] = SourceModule.read(path)
        except SpecError:
            continue
        waiting += _imports(modules[key], path, root)
    return list(modules.values())


def read_folder(folder: Path) -> tuple[list[SourceModule], list[str]]:
    """Read every Python file of a folder; return those that cannot be parsed as notices."""
    modules, notices = [], []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if not any(part in _FOREIGN or part.startswith(".") for part in parts):
            try:
                modules.append(SourceModule.read(path))
            except SpecError as error:
                notices.append(str(error))
    return modules, notices


def find_module(name: str, folder: Path) -> Path | None:
    """Return the file of a module as `python -m` finds it in a folder, without importing anything; None: elsewhere."""
    path = folder.joinpath(*name.split("."))
    candidates = (path / "__main__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _is_own(path: Path) -> bool:
    return path.is_file() and path.suffix == ".py" and is_users(str(path))


def _imports(module: SourceModule, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a module's imports may mean, in its own folder and its project."""
    folders = [path.parent, root, root / "src"]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _files(item.name, folders)
        elif isinstance(node, ast.ImportFrom):
            bases = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else folders
            names = [node.module] if node.module else []
            names += [".".join(filter(None, (node.module, item.name))) for item in node.names]
            for name in names:
                yield from _files(name, bases)


def _files(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        path = folder.joinpath(*name.split("."))
        for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if candidate.is_file():
                yield candidate
