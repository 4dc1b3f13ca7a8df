"""The checkpoints of a run, and whether they are complete. Read-only, and without torch.

Listing compares the sizes of the files with the manifest; `verify` also reads them and compares their SHA-256. A good
checkpoint is one that `Checkpoint` would load when training resumes.
"""

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from instep.checkpoint.manifest import MANIFEST, READABLE_VERSIONS, STATE, FileEntry, Manifest, step_of
from instep.core.errors import CheckpointError

_ASIDE = ("damaged-", "doubtful-")
"""The prefixes of checkpoints that a run has taken out of use."""
_RUN_MARKS = ("spec.json", "result.json", "checkpoints", "events")
_NAME = re.compile(rf"(?P<before>\.|{'|'.join(_ASIDE)}|)(?P<name>step-\d{{8,}})(?P<after>\..*)?", re.DOTALL)
_CHUNK_BYTES = 4 << 20
_MISSING = "missing"
SETTLED_S = 0.2
"""A folder whose files do not change for this long is not being deleted."""


class Kind(StrEnum):
    """What a folder is."""

    CHECKPOINT = "checkpoint"
    FOREIGN = "other format"
    ASIDE = "set aside"
    UNFINISHED = "half-written"


class Problem(NamedTuple):
    """A file that is not as it was written."""

    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


class OtherFormat(Problem):
    """An intact manifest of a version that this instep does not read."""


class Entry(NamedTuple):
    """One folder of an inventory."""

    path: Path
    kind: Kind
    step: int | None
    """None if neither the name nor the manifest contains it."""
    saved_at_s: float
    num_bytes: int
    num_files: int
    problems: tuple[Problem, ...] = ()
    verified: bool = False
    """Whether every byte was read, or only the sizes compared."""
    scores: tuple[tuple[str, float], ...] = ()
    """The metrics of its step, if that was evaluated."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return _name_of(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether it is a checkpoint without a known problem."""
        return self.kind is Kind.CHECKPOINT and not self.problems

    @property
    def is_damaged(self) -> bool:
        """Whether it has a checkpoint's name, but this instep cannot use it."""
        return self.kind in (Kind.CHECKPOINT, Kind.FOREIGN) and bool(self.problems)

    @property
    def state(self) -> str:
        """Its state in a word or two."""
        if self.kind is not Kind.CHECKPOINT:
            return str(self.kind)
        return "damaged" if self.problems else "good" if self.verified else "sizes agree"


class Inventory(NamedTuple):
    """The checkpoints of a run, newest first; or the single checkpoint that the user named."""

    path: Path
    is_run: bool
    entries: tuple[Entry, ...]

    @property
    def checkpoints(self) -> tuple[Entry, ...]:
        """The entries with a checkpoint's name, damaged ones included."""
        return tuple(entry for entry in self.entries if entry.kind in (Kind.CHECKPOINT, Kind.FOREIGN))

    @property
    def ok(self) -> bool:
        """Whether no checkpoint that a run would use is damaged; it does not use those that were set aside."""
        return not any(entry.is_damaged for entry in self.entries)


def take_inventory(path: Path) -> Inventory:
    """List the checkpoints of a run directory, or a single checkpoint; compare sizes only."""
    try:
        return _take_inventory(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. Fix that, then try again.") from error


def _take_inventory(path: Path) -> Inventory:
    if not path.is_dir():
        what = "a file" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {what}. Give the directory of a run (runs/digits-…) or of one checkpoint.")
    if (path / MANIFEST).exists() or _kind_of(_name_of(path)) is not None:
        entry = inspect_checkpoint(path)
        return Inventory(path, is_run=False, entries=(entry,) if entry else ())
    path = _run_of(path)
    folder = path / "checkpoints"
    entries = [inspect_checkpoint(child) for child in _folders(folder)] if folder.is_dir() else []
    ordered = sorted((e for e in entries if e is not None), key=lambda e: (e.step or 0, e.name), reverse=True)
    return Inventory(path, is_run=True, entries=tuple(ordered))


def inspect_checkpoint(path: Path) -> Entry | None:
    """Read a folder's manifest and compare sizes; None if a run deleted the folder meanwhile."""
    kind, step = _kind_of(_name_of(path)) or (Kind.CHECKPOINT, None)
    try:
        files = [child.stat() for child in path.iterdir() if child.is_file()]
        saved_at_s = ((path / MANIFEST) if (path / MANIFEST).exists() else path).stat().st_mtime
    except FileNotFoundError:
        return None
    entry = Entry(path, kind, step, saved_at_s, sum(file.st_size for file in files), len(files))
    return _check_files(entry, _size_problem)


def verify(entry: Entry, progress: Callable[[int], None] = lambda _: None) -> Entry | None:
    """Read every file of a checkpoint and compare sizes and hashes; None if a run deleted the folder meanwhile.

    `progress` is called with the number of bytes that were read since the last call. A half-written checkpoint has no
    manifest to compare with.
    """
    checked = _check_files(entry, partial(content_problem, progress=progress))
    return None if checked is None else checked._replace(verified=entry.kind is not Kind.UNFINISHED)


def _check_files(entry: Entry, find_problem: Callable[[Path, FileEntry], Problem | None]) -> Entry | None:
    if entry.kind is Kind.UNFINISHED:
        return entry
    manifest = read_manifest(entry.path)
    if isinstance(manifest, Problem):
        is_foreign = isinstance(manifest, OtherFormat) and entry.kind is Kind.CHECKPOINT
        return _unless_gone(entry._replace(kind=Kind.FOREIGN if is_foreign else entry.kind, problems=(manifest,)))
    problems = [find_problem(entry.path / name, file) for name, file in manifest.files.items()]
    step = manifest.step if entry.step is None else entry.step
    return _unless_gone(
        entry._replace(step=step, problems=tuple(filter(None, problems)), scores=tuple(manifest.scores.items()))
    )


def newest_good(
    entries: Iterable[Entry], num_wanted: int = 1, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Entry], list[Entry]]:
    """Verify checkpoints, newest first, until enough are good; return those and the damaged ones before them."""
    good: list[Entry] = []
    damaged: list[Entry] = []
    for entry in entries:
        if len(good) == num_wanted:
            break
        checked = verify(entry, progress)
        if checked is not None:
            (good if checked.is_whole else damaged).append(checked)
    return good, damaged


def _name_of(path: Path) -> str:
    return path.name or Path(os.path.abspath(path)).name  # "." has a name too


def _kind_of(name: str) -> tuple[Kind, int | None] | None:
    """Return what a folder is by its name, and its step; None if it is not a name that a run uses."""
    match = _NAME.fullmatch(name)
    if match is None or (match["after"] and match["before"] != "."):
        return None
    kinds = {"": Kind.CHECKPOINT, ".": Kind.UNFINISHED, **dict.fromkeys(_ASIDE, Kind.ASIDE)}
    return kinds[match["before"]], step_of(match["name"])


def _folders(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if _kind_of(child.name) is not None and child.is_dir()]


def _run_of(path: Path) -> Path:
    """Return the run directory, given itself or its checkpoints folder."""
    if _name_of(path) == "checkpoints" and (any(_folders(path)) or (path / ".." / "spec.json").exists()):
        return path.parent if path.name == "checkpoints" else path / ".."
    if any((path / mark).exists() for mark in _RUN_MARKS):
        return path
    runs = sorted(child.name for child in path.iterdir() if os.path.exists(child / "spec.json"))
    hint = f" It contains runs, though: {', '.join(runs[:5])}{', …' * (len(runs) > 5)}." if runs else ""
    raise CheckpointError(
        f"{path} is not a run: it has neither a spec.json nor checkpoints.{hint} "
        "Give the directory of a run or of a checkpoint."
    )


def read_manifest(path: Path) -> Manifest | Problem:
    """Read the manifest of a checkpoint, or return what is wrong with it."""
    try:
        if not stat.S_ISREG((path / MANIFEST).stat().st_mode):  # reading a pipe would block for ever
            return Problem(MANIFEST, "not a file")
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        return Problem(MANIFEST, _reason(error))
    if not data.strip():
        return Problem(MANIFEST, "empty")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Problem(MANIFEST, f"not JSON ({error})")
    try:
        manifest = Manifest.from_json(content)
    except ValueError as error:
        version = content.get("version") if isinstance(content, dict) else None
        is_other = isinstance(version, int) and version not in READABLE_VERSIONS
        return (OtherFormat if is_other else Problem)(MANIFEST, str(error))
    return manifest if STATE in manifest.files else Problem(MANIFEST, f"it names no {STATE}")


def _size_problem(path: Path, entry: FileEntry) -> Problem | None:
    try:
        status = path.stat()
    except OSError as error:
        return Problem(path.name, _reason(error))
    if not stat.S_ISREG(status.st_mode):
        return Problem(path.name, "not a file")
    if status.st_size != entry.num_bytes:
        return Problem(path.name, f"{status.st_size:,} bytes, and {entry.num_bytes:,} were written")
    return None


def content_problem(path: Path, entry: FileEntry, progress: Callable[[int], None] = lambda _: None) -> Problem | None:
    """Read a file chunk by chunk and return what is wrong with it; None if it is as it was written."""
    problem = _size_problem(path, entry)
    if problem is not None:
        return problem
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                progress(count)
    except OSError as error:
        return Problem(path.name, _reason(error))
    if digest.hexdigest() != entry.sha256:
        return Problem(path.name, "its bytes are not those that were written (another SHA-256)")
    return None


def _reason(error: OSError) -> str:
    return _MISSING if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


def _unless_gone(entry: Entry) -> Entry | None:
    """Return None if a run is deleting the folder: its files go missing one by one, then the folder."""
    if any(problem.text == _MISSING for problem in entry.problems):
        before: set[Path] | None = None
        while (now := set(entry.path.glob("*"))) != before:
            before = now
            time.sleep(SETTLED_S)
    return entry if not entry.problems or entry.path.exists() else None
