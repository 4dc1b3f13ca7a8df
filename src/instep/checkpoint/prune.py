"""Delete checkpoints of a run that are no longer needed: plan from verified checkpoints first, then delete."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from instep.checkpoint.files import sync_directory
from instep.checkpoint.inventory import Entry, Inventory, Kind, newest_good
from instep.core.errors import CheckpointError


class PrunePlan(NamedTuple):
    """Which checkpoints to keep and which to delete."""

    kept: tuple[Entry, ...]
    """The newest good ones, verified."""
    doomed: tuple[Entry, ...]
    """Those to delete."""
    left: tuple[Entry, ...]
    """Neither good nor to be deleted: damaged ones that the user did not ask to delete, or of another format."""


def plan_pruning(
    inventory: Inventory, keep: int, damaged_too: bool, progress: Callable[[int], None] = lambda _: None
) -> PrunePlan:
    """Plan to keep the newest `keep` good ones; without a good one nothing is deleted, damaged ones neither.

    Checkpoints are verified, newest first, until enough are good. Older ones are not read: they are deleted unless
    their sizes show that they are damaged.
    """
    kept, bad = newest_good(inventory.checkpoints, keep, progress)
    targets = {entry.path.resolve() for entry in kept}  # if a symbolic link is kept, its target is kept with it
    kept += [e for e in inventory.entries if e.path not in _paths(kept) and e.path.resolve() in targets]
    read = _paths([*kept, *bad])
    rest = [entry for entry in inventory.entries if entry.path not in read and entry.path.exists()]
    doomed = [entry for entry in rest if entry.is_whole]
    unusable = [*bad, *(entry for entry in rest if not entry.is_whole)]
    if damaged_too and kept:
        doomed += [entry for entry in unusable if entry.kind is not Kind.FOREIGN]
        unusable = [entry for entry in unusable if entry.kind is Kind.FOREIGN]
    return PrunePlan(tuple(kept), tuple(doomed), tuple(unusable))


def _paths(entries: Iterable[Entry]) -> set[Path]:
    return {entry.path for entry in entries}


def prune(plan: PrunePlan) -> Iterator[Entry]:
    """Delete the checkpoints that the plan dooms and yield each when it is deleted. Hold the run's lock."""
    assert plan.kept or not plan.doomed
    for entry in plan.doomed:
        try:
            _delete(entry)
        except OSError as error:
            raise CheckpointError(
                f"{entry.path} cannot be deleted: {error.strerror or error}. Fix the cause, then run it again."
            ) from error
        yield entry


def _delete(entry: Entry) -> None:
    path = entry.path
    if path.is_symlink():  # its target does not belong to the run
        path.unlink()
        return
    if entry.kind is not Kind.UNFINISHED:  # from here on it is half-written, not a checkpoint with missing files
        doomed = path.with_name(f".{path.name.removeprefix('damaged-').removeprefix('doubtful-')}.pruned.{os.getpid()}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        sync_directory(path.parent)
        path = doomed
    shutil.rmtree(path)
