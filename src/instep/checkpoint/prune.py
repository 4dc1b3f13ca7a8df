"""Delete the checkpoints of a run that are no longer wanted: planned first, from verified facts, then done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint.files import sync_directory
from instep.checkpoint.inventory import Entry, Inventory, Kind, newest_good
from instep.core.errors import CheckpointError


@dataclass(frozen=True)
class PrunePlan:
    """What stays and what goes."""

    kept: tuple[Entry, ...]
    """The newest good ones, every byte of them read."""
    doomed: tuple[Entry, ...]
    left: tuple[Entry, ...]
    """Neither good nor to be deleted: damaged ones nobody asked to clear away, or of another format."""


def plan_pruning(
    found: Inventory, keep: int, damaged_too: bool, progress: Callable[[int], None] = lambda _: None
) -> PrunePlan:
    """Keep the newest `keep` good ones; without any good one nothing is deleted, damaged ones neither.

    Checkpoints are read from the newest on until enough are good. Those older than that are not read: they go
    unless a look shows that they are damaged.
    """
    kept, bad = newest_good(found.checkpoints, keep, progress)
    homes = {entry.path.resolve() for entry in kept}  # a link may have been kept: what it leads to is kept with it
    kept += [e for e in found.entries if e.path not in _paths(kept) and e.path.resolve() in homes]
    read = _paths([*kept, *bad])
    rest = [entry for entry in found.entries if entry.path not in read and entry.path.exists()]
    doomed = [entry for entry in rest if entry.is_whole]
    unusable = [*bad, *(entry for entry in rest if not entry.is_whole)]
    if damaged_too and kept:
        doomed += [entry for entry in unusable if entry.kind is not Kind.FOREIGN]
        unusable = [entry for entry in unusable if entry.kind is Kind.FOREIGN]
    return PrunePlan(tuple(kept), tuple(doomed), tuple(unusable))


def _paths(entries: Iterable[Entry]) -> set[Path]:
    return {entry.path for entry in entries}


def prune(plan: PrunePlan) -> Iterator[Entry]:
    """Delete what the plan dooms, one after the other, and give each when it is gone. Hold the run's lock."""
    assert plan.kept or not plan.doomed
    for entry in plan.doomed:
        try:
            _delete(entry)
        except OSError as error:
            raise CheckpointError(
                f"{entry.path} cannot be deleted: {error.strerror or error}. Look into that, then run it again."
            ) from error
        yield entry


def _delete(entry: Entry) -> None:
    path = entry.path
    if path.is_symlink():  # what it leads to is not the run's
        path.unlink()
        return
    if entry.kind is not Kind.UNFINISHED:  # from here on it is half-written, not a checkpoint that lacks files
        doomed = path.with_name(f".{path.name.removeprefix('damaged-').removeprefix('doubtful-')}.pruned.{os.getpid()}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        sync_directory(path.parent)
        path = doomed
    shutil.rmtree(path)
