"""The folder of a search: what is searched there, whether that may be continued, and where its trials are.

search.json          what is searched, and how
study.db             Optuna's study, for optuna-dashboard
trials/0007/         the run directory of trial 7
report.html          plots of the study
"""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.checkpoint.files import replace_synced
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError

SEARCH = "search.json"
_VERSION = 1


class SearchFolder:
    """The folder of one search."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = RunDirectory(path)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path | None, name: str, fresh: bool) -> Iterator[SearchFolder]:
        """Yield the folder that the user named, or a new one, locked against other searches."""
        if path is None:
            path = RunDirectory.create(f"{name}-tune").path
        elif fresh and (path / SEARCH).exists():
            _move_aside(path)
        folder = cls(path)
        folder._make()
        folder._directory.lock()
        try:
            yield folder
        finally:
            folder._directory.unlock()

    def _make(self) -> None:
        """Make the folder; raise CheckpointError if it holds something else."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file, and a search needs a folder. Give another --run-dir.")
        names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set[str]()
        if names - {".lock"} and SEARCH not in names and not _half_written(names):
            raise CheckpointError(
                f"{self.path} is not empty and holds no {SEARCH}, so it is not a search's. Give another --run-dir."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be created: {error.strerror}. Give another --run-dir."
            ) from error

    def describe(self, description: Mapping[str, Any]) -> str:
        """Write what is searched, or check that it is what this folder holds; return the id of the search."""
        path = self.path / SEARCH
        now = json.loads(json.dumps({"version": _VERSION, "id": uuid.uuid4().hex, **description}))
        if not path.exists():
            replace_synced(path, json.dumps(now, indent=1).encode())
        try:
            earlier = json.loads(path.read_bytes())
            now["id"] = search_id = str(earlier["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Use another --run-dir, or --fresh.") from error
        if lines := _differences(earlier, now):
            raise CheckpointError(
                f"{self.path} holds another search, which cannot be continued with this one:\n"
                + "\n".join(f"  {line}" for line in lines)
                + "\nUse the same values, another --run-dir, or --fresh to start over (the old search is moved aside)."
            )
        return search_id

    def trial(self, number: int) -> Path:
        """Return the run directory of a trial."""
        return self.path / "trials" / f"{number:04d}"

    @property
    def report(self) -> Path:
        """The page with the plots."""
        return self.path / "report.html"


def _half_written(names: set[str]) -> bool:
    return all(name.startswith(f".{SEARCH}.") or name == ".lock" for name in names)


def _move_aside(path: Path) -> None:
    old = RunDirectory(path)
    old.lock()  # refuse to move a search that is still running
    numbered = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    path.rename(next(unused for unused in numbered if not unused.exists()))
    old.unlock()


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> list[str]:
    """List what differs between two descriptions."""
    lines = []
    for key in sorted({*earlier, *now}):
        there, here = earlier.get(key), now.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            lines += _differences(there, here, f"{of}{key} ")
        elif there != here:
            lines.append(f"{of}{key}: {_shown(there)} there, {_shown(here)} now")
    return lines


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
