"""What lies in a run's checkpoints folder, and whether it is whole. Reads only, and needs no torch.

A look compares the sizes of the files with the manifest; `verify` also reads them and compares their SHA-256.
Good means what it means to a training that goes on: `Checkpoint` would take it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from instep.checkpoint import layout
from instep.core.errors import CheckpointError

ASIDE = ("damaged-", "doubtful-")
"""What a name begins with that a run has taken out of use."""
"""What a training puts before the name of a checkpoint that it could not read."""
_RUN_MARKS = ("spec.json", "result.json", "checkpoints", "events")
_NAME = re.compile(rf"(?P<before>\.|{'|'.join(ASIDE)}|)(?P<name>step-\d{{8,}})(?P<after>\..*)?", re.DOTALL)
_CHUNK_BYTES = 4 << 20
MISSING = "missing"
SETTLED_S = 0.2
"""A folder whose files are the same for so long is not being deleted."""


class Kind(StrEnum):
    """What a folder is."""

    CHECKPOINT = "checkpoint"
    FOREIGN = "other format"
    ASIDE = "set aside"
    UNFINISHED = "half-written"


@dataclass(frozen=True)
class Problem:
    """One file that is not as it was written."""

    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


class OtherFormat(Problem):
    """A manifest that is not broken, but of a version that this instep does not read."""


@dataclass(frozen=True)
class Entry:
    """One folder, as it was found."""

    path: Path
    kind: Kind
    step: int | None
    """None where neither the name nor the manifest tells."""
    saved_at_s: float
    num_bytes: int
    num_files: int
    problems: tuple[Problem, ...] = ()
    verified: bool = False
    """Whether every byte was read, or only the sizes compared."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return _name_of(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether it is a checkpoint in which nothing wrong was found, as far as was looked."""
        return self.kind is Kind.CHECKPOINT and not self.problems

    @property
    def is_damaged(self) -> bool:
        """Whether it has a checkpoint's name and is none that this instep can use."""
        return self.kind in (Kind.CHECKPOINT, Kind.FOREIGN) and bool(self.problems)

    @property
    def state(self) -> str:
        """Its state in a word or two."""
        if self.kind is not Kind.CHECKPOINT:
            return str(self.kind)
        return "damaged" if self.problems else "good" if self.verified else "sizes agree"


@dataclass(frozen=True)
class Inventory:
    """The checkpoints of a run, newest first; or the one that was named."""

    path: Path
    is_run: bool
    entries: tuple[Entry, ...]

    @property
    def checkpoints(self) -> tuple[Entry, ...]:
        """Those under a checkpoint's name, whole or not."""
        return tuple(entry for entry in self.entries if entry.kind in (Kind.CHECKPOINT, Kind.FOREIGN))

    @property
    def ok(self) -> bool:
        """Whether nothing that would be used is damaged; what was set aside already is not used."""
        return not any(entry.is_damaged for entry in self.entries)


def take_inventory(path: Path) -> Inventory:
    """List a run directory, or a single checkpoint, with a quick look at each."""
    try:
        return _take_inventory(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. Look into that.") from error


def _take_inventory(path: Path) -> Inventory:
    if not path.is_dir():
        what = "a file" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {what}. Give a run's directory, runs/digits-… say, or one checkpoint's.")
    if _is_checkpoint(path):
        entry = look_at(path)
        return Inventory(path, is_run=False, entries=(entry,) if entry else ())
    path = _run_of(path)
    folder = path / "checkpoints"
    found = [look_at(each) for each in _folders(folder)] if folder.is_dir() else []
    entries = sorted((e for e in found if e is not None), key=lambda e: (e.step or 0, e.name), reverse=True)
    return Inventory(path, is_run=True, entries=tuple(entries))


def look_at(path: Path) -> Entry | None:
    """Read a folder's manifest and compare sizes; None if it went away meanwhile (a training deletes old ones)."""
    kind, step = _kind_of(_name_of(path)) or (Kind.CHECKPOINT, None)
    try:
        files = [each.stat() for each in path.iterdir() if each.is_file()]
        saved_at_s = ((path / layout.MANIFEST) if (path / layout.MANIFEST).exists() else path).stat().st_mtime
    except FileNotFoundError:
        return None
    entry = Entry(path, kind, step, saved_at_s, sum(each.st_size for each in files), len(files))
    if kind is Kind.UNFINISHED:
        return entry
    manifest = _read_manifest(path)
    if isinstance(manifest, Problem):
        if isinstance(manifest, OtherFormat) and kind is Kind.CHECKPOINT:
            entry = replace(entry, kind=Kind.FOREIGN)
        return _unless_gone(replace(entry, problems=(manifest,)))
    problems = [_size_problem(path / name, file) for name, file in manifest.files.items()]
    step = manifest.step if step is None else step
    return _unless_gone(replace(entry, step=step, problems=tuple(each for each in problems if each)))


def verify(entry: Entry, progress: Callable[[int], None] = lambda _: None) -> Entry | None:
    """Read every file of a checkpoint and compare sizes and hashes; None if it went away meanwhile.

    `progress` is called with the number of bytes that were read since the last call. What is half-written has
    nothing to be compared with.
    """
    if entry.kind is Kind.UNFINISHED:
        return entry
    manifest = _read_manifest(entry.path)
    if isinstance(manifest, Problem):
        return _unless_gone(replace(entry, problems=(manifest,), verified=True))
    problems = [content_problem(entry.path / name, file, progress) for name, file in manifest.files.items()]
    return _unless_gone(replace(entry, problems=tuple(each for each in problems if each), verified=True))


def newest_good(
    entries: Iterable[Entry], num_wanted: int = 1, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Entry], list[Entry]]:
    """Verify checkpoints from the newest on until enough are good; give those, and the damaged ones on the way."""
    good: list[Entry] = []
    damaged: list[Entry] = []
    for entry in entries:
        if len(good) == num_wanted:
            break
        checked = verify(entry, progress)
        if checked is not None:
            (good if checked.is_whole else damaged).append(checked)
    return good, damaged


def _is_checkpoint(path: Path) -> bool:
    return (path / layout.MANIFEST).exists() or _kind_of(_name_of(path)) is not None


def _name_of(path: Path) -> str:
    return path.name or Path(os.path.abspath(path)).name  # "." has a name too


def _kind_of(name: str) -> tuple[Kind, int | None] | None:
    """Tell what a folder is by its name, and its step; None for a name that no run gives."""
    match = _NAME.fullmatch(name)
    if match is None or (match["after"] and match["before"] != "."):
        return None
    kinds = {"": Kind.CHECKPOINT, ".": Kind.UNFINISHED, **dict.fromkeys(ASIDE, Kind.ASIDE)}
    return kinds[match["before"]], layout.step_of(match["name"])


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if _kind_of(each.name) is not None and each.is_dir()]


def _run_of(path: Path) -> Path:
    """Find the run's directory; whoever names its checkpoints folder means the run."""
    if _name_of(path) == "checkpoints" and (any(_folders(path)) or (path / ".." / "spec.json").exists()):
        return path.parent if path.name == "checkpoints" else path / ".."
    if any((path / mark).exists() for mark in _RUN_MARKS):
        return path
    runs = sorted(each.name for each in path.iterdir() if os.path.exists(each / "spec.json"))
    hint = f" It holds runs, though: {', '.join(runs[:5])}{', …' * (len(runs) > 5)}." if runs else ""
    raise CheckpointError(
        f"{path} is no run: it holds neither a spec.json nor checkpoints.{hint} "
        "Give a run's directory, or a checkpoint's."
    )


def _read_manifest(path: Path) -> layout.Manifest | Problem:
    try:
        data = (path / layout.MANIFEST).read_bytes()
    except OSError as error:
        return Problem(layout.MANIFEST, _why(error))
    if not data.strip():
        return Problem(layout.MANIFEST, "empty")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Problem(layout.MANIFEST, f"not JSON ({error})")
    try:
        manifest = layout.Manifest.from_json(content)
    except ValueError as error:
        version = content.get("version") if isinstance(content, dict) else None
        is_other = isinstance(version, int) and version not in layout.READABLE
        return (OtherFormat if is_other else Problem)(layout.MANIFEST, str(error))
    if layout.STATE not in manifest.files:
        return Problem(layout.MANIFEST, f"it names no {layout.STATE}")
    return manifest


def _size_problem(path: Path, entry: layout.FileEntry) -> Problem | None:
    try:
        found = path.stat()
    except OSError as error:
        return Problem(path.name, _why(error))
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        return Problem(path.name, "not a file")
    if found.st_size != entry.num_bytes:
        return Problem(path.name, f"{found.st_size:,} bytes, and {entry.num_bytes:,} were written")
    return None


def content_problem(
    path: Path, entry: layout.FileEntry, progress: Callable[[int], None] = lambda _: None
) -> Problem | None:
    """Read a file, a little at a time, and say what is wrong with it; None: it is as it was written."""
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
        return Problem(path.name, _why(error))
    if digest.hexdigest() != entry.sha256:
        return Problem(path.name, "its bytes are not those that were written (another SHA-256)")
    return None


def _why(error: OSError) -> str:
    return MISSING if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


def _unless_gone(entry: Entry) -> Entry | None:
    """Leave out what a training is deleting just now: one file after the other goes missing, then the folder."""
    if any(problem.text == MISSING for problem in entry.problems):
        before: set[str] | None = None
        while (now := _names_in(entry.path)) != before:
            before = now
            time.sleep(SETTLED_S)
    return entry if not entry.problems or entry.path.exists() else None


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
