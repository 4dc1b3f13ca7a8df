"""The runs that a page shows: found in folders, each with a name, and one line about where each stands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from instep.core.errors import SpecError
from instep.events.read import path_of
from instep.monitor.run_log import check_run, fault_of

MAX_DEPTH = 4
_HEAD_BYTES, _TAIL_BYTES = 2**14, 2**16
_NUM_NEWEST = 200
_SKIPPED = ("checkpoints", "events", "logs")


class RunIndex:
    """Finds the runs of folders, also those that start later, and knows them by name."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.named: list[str] = []
        """The runs that were given themselves, not by a folder."""
        self._roots = [root.resolve() for root in roots]
        self._summaries: dict[Path, tuple[tuple[float, int], dict[str, Any]]] = {}
        for root, given in zip(self._roots, roots, strict=True):
            if next(_runs_under(root), None) is None:
                check_run(given)  # raises, and says what it is instead
        self._paths = self._find()
        self.named = [name for name, path in self._paths.items() if path in self._roots]

    def path(self, name: str) -> Path:
        """Return the directory of a run; only names of runs that were found lead to one."""
        if name not in self._paths:
            self._paths = self._find()
        if name not in self._paths:
            raise SpecError(f"there is no run {name!r} here any more, or not yet.")
        return self._paths[name]

    def summaries(self) -> list[dict[str, Any]]:
        """Return one line about each run, the newest first."""
        self._paths = self._find()
        lines = [{"name": name, **self._summary(path)} for name, path in self._paths.items()]
        return sorted(lines, key=lambda line: line.get("time_s") or 0.0, reverse=True)

    def _find(self) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for root in self._roots:
            for path in _runs_under(root):
                name = path.name if path == root else path.relative_to(root).as_posix()
                if name in paths and paths[name] != path:
                    name = str(path)
                paths[name] = path
        return paths

    def _summary(self, path: Path) -> dict[str, Any]:
        """Return a run's line; a log that has not changed is not read again."""
        try:
            stat = path_of(path).stat()
            key = (stat.st_mtime, stat.st_size)
            if self._summaries.get(path, (None, {}))[0] != key:
                self._summaries[path] = (key, summary(path))
        except OSError as error:
            return {"error": f"cannot be read ({error.strerror or error})"}
        return {**self._summaries[path][1], "is_complete": (path / "result.json").exists()}


def summary(run_dir: Path) -> dict[str, Any]:
    """Return where a run stands, from the first and the last lines of rank 0's log."""
    path, line = path_of(run_dir), dict[str, Any](status="training", error="")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read().split(b"\n")
    for event in _events(head.split(b"\n")):
        if event["event"] == "start":
            line.setdefault("begun_s", event.get("time"))
        elif event["event"] == "plan":
            line |= _of_plan(event)
            break
    kinds: set[str] = set()
    for event in _events(tail[: -_NUM_NEWEST - 1 : -1]):
        line.setdefault("time_s", event.get("time"))
        kind = event["event"]
        if kind not in kinds:
            line |= _of_newest(kind, event, kinds)
            kinds.add(kind)
    if (line.get("num_steps") or 0) < line.get("step", 0):  # of an earlier command, which asked for fewer steps
        line.pop("num_steps", None)
    return line


def _of_plan(event: dict[str, Any]) -> dict[str, Any]:
    return {name: event.get(name) for name in ("task", "num_steps", "strategy")}


def _of_newest(kind: str, event: dict[str, Any], later: set[str]) -> dict[str, Any]:
    """Return what the newest event of a kind says of a run."""
    if kind == "step":
        return {"step": event.get("step"), "loss": event.get("loss")}
    if kind == "eval":
        return {"metrics": event.get("metrics")}
    if kind == "start":
        return {"world_size": event.get("world_size")}
    if kind == "plan":
        return _of_plan(event)
    if kind == "end" and "start" not in later:
        return {"status": event.get("status"), "error": event.get("error") or ""}
    return {}


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # cut off, damaged, or still being written
            continue
        if isinstance(event, dict) and fault_of(event) is None:
            yield event


def _runs_under(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the runs in a folder and its subfolders; a run's own folders are not searched."""
    if path_of(folder).exists() or (folder / "spec.json").is_file():
        yield folder
        return
    if depth == 0 or not folder.is_dir():
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        if name not in _SKIPPED and not name.startswith("."):
            yield from _runs_under(folder / name, depth - 1)
