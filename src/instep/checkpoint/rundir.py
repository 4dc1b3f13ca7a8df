"""The run directory: what a run is, whether it may be continued, and its newest good checkpoint.

Ranks: one, rank 0 or the process that launches; the others are told.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from instep.checkpoint import layout
from instep.checkpoint.files import Checkpoint, read_manifest, replace_synced, write_checkpoint
from instep.checkpoint.snapshot import Snapshot
from instep.core.errors import CheckpointError

if TYPE_CHECKING:  # it needs more of torch than a process that only launches others
    from instep.checkpoint.sharing import SharedSave

_JOB_MEETS_S = 5.0
SPEC, RESULT = "spec.json", "result.json"
_BEFORE = {"precision": "fp32"}
"""What fields of a recipe were before there was a choice."""
_UNDECIDED = ("precision", "auto")
"""What only a machine that trains can decide: elsewhere it contradicts nothing."""
_BEFORE_SPEC = {"events", "logs", ".lock", ".world", "submit.sh"}
"""What a run leaves that was killed before it was settled, or that waits in a queue."""


class RunDirectory:
    """The directory of one run, as DESIGN lays it out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[bytes] | None = None
        self._world: IO[bytes] | None = None
        self._aside: Path | None = None

    @classmethod
    def create(cls, name: str, root: Path = Path("runs")) -> RunDirectory:
        """Make a directory of a new name for a new run."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for number in range(1000):
            path = root / (f"{name}-{stamp}" + (f"-{number}" if number else ""))
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise CheckpointError(f"{path} cannot be made: {error.strerror}. Give another --run-dir.") from error
            return cls(path)
        raise CheckpointError(f"{root} holds a thousand runs of this second. Give a --run-dir.")

    @classmethod
    def open(cls, path: Path, fresh: bool = False, job: str = "") -> RunDirectory:
        """Take a directory that the user names: a new one, or that of a run to continue; `job` as for `lock`."""
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file, and a run needs a directory. Give another --run-dir.")
        aside = None
        if path.exists() and _found(path) - _BEFORE_SPEC:
            if not (path / SPEC).exists():
                raise CheckpointError(
                    f"{path} is not empty and holds no {SPEC}, so it is not a run's directory. Give another --run-dir."
                )
            old = cls(path)
            if fresh and not (job and old.owner() == job and old.is_locked()):  # else another machine has done it
                old.lock()  # not under the feet of a training that goes on in it
                aside = _move_aside(path)
                old.unlock()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be made: {error.strerror}. Give another --run-dir.") from error
        directory = cls(path)
        directory._aside = aside
        return directory

    def give_up(self) -> None:
        """Put back the run that was moved aside for this one, which was never begun."""
        if self._aside is not None:
            shutil.rmtree(self.path)
            self._aside.rename(self.path)
            self._aside = None

    def settle(self, description: Mapping[str, Any], may_extend: bool) -> None:
        """Check that what was asked for is the run that lives here, and write it down if none does.

        `description` has `task`, `recipe`, `length` (epochs, steps) and `spec`; only a changed spec is
        nothing to worry about.
        """
        path = self.path / SPEC
        earlier = self.check(description, may_extend)
        if earlier is not None and earlier["length"] != description["length"]:
            (self.path / RESULT).unlink(missing_ok=True)
        replace_synced(path, json.dumps({"version": 1, **description}, indent=1).encode())

    def check(self, description: Mapping[str, Any], may_extend: bool) -> dict[str, Any] | None:
        """Refuse what cannot continue the run that lives here; give that run's description, or None."""
        if not (self.path / SPEC).exists() or not (self.names() or self.result() is not None):
            return None  # without a checkpoint or a result there is nothing to continue
        earlier = self.description()
        if differences := _differences(earlier, description, may_extend):
            raise CheckpointError(
                f"{self.path} holds a run of another recipe, which this one cannot continue:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nUse the same values, another --run-dir, or --fresh to start over (the old run is moved aside)."
            )
        return earlier

    def description(self) -> dict[str, Any]:
        """Read what `settle` wrote."""
        path = self.path / SPEC
        try:
            found = json.loads(path.read_bytes())
            if not {"task", "recipe", "length", "spec"} <= found.keys():
                raise ValueError("fields are missing")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Use another --run-dir, or --fresh.") from error
        return dict(found)

    def result(self) -> dict[str, Any] | None:
        """Give the result of a complete run; None for one that is not."""
        path = self.path / RESULT
        return dict(json.loads(path.read_bytes())) if path.exists() else None

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Mark the run complete; the last thing that is written."""
        replace_synced(self.path / RESULT, json.dumps(result, indent=1).encode())

    def lock(self, job: str = "") -> None:
        """Keep a second training out of this directory for as long as this process lives.

        The launching processes of one `job` on several machines share it; without one nobody else is let in.
        """
        if self._lock is not None:
            return
        file = (self.path / ".lock").open("a+b")
        deadline = time.monotonic() + (_JOB_MEETS_S if job else 0.0)
        while not _locked(file, fcntl.LOCK_EX):
            if job and self.owner() == job and _locked(file, fcntl.LOCK_SH):
                self._lock = file
                return
            if time.monotonic() >= deadline:  # machines that start together find the lock half taken
                owner = self.owner()
                file.close()
                raise CheckpointError(
                    f"{self.path} is being trained in by {owner}. Wait for it, end it, or give another --run-dir."
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write((job or f"process {os.getpid()}").encode())
        file.flush()
        if job and not _locked(file, fcntl.LOCK_SH):
            file.close()
            raise CheckpointError(f"{self.path} was taken by another training just now. Give another --run-dir.")
        self._lock = file

    def meet(self, world: str) -> None:
        """Refuse a second world of the same job, whose machines did not meet those that train here already.

        They find that out by the name that all who have met know.
        """
        self._world = file = (self.path / ".world").open("a+b")
        deadline = time.monotonic() + _JOB_MEETS_S
        if _locked(file, fcntl.LOCK_EX):  # the first one, for as long as somebody is here
            file.truncate(0)
            file.write(world.encode())
            file.flush()
        while not _locked(file, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(0.05)
        if (self.path / ".world").read_bytes().decode(errors="replace") != world:
            raise CheckpointError(
                f"{self.path} is being trained in by machines of the same job that this one has not met. Does "
                "--rdzv-endpoint lead each of them to itself? Give an address that is the same machine for all of them."
            )

    def owner(self) -> str:
        """Say who trains here, or did so last."""
        path = self.path / ".lock"
        return (path.read_bytes().decode(errors="replace") if path.exists() else "") or "an unknown process"

    def is_locked(self) -> bool:
        """Tell whether somebody trains here."""
        with (self.path / ".lock").open("a+b") as file:
            return not _locked(file, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let the next training in."""
        for file in filter(None, (self._world, self._lock)):
            file.close()
        self._world = self._lock = None

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Find the newest checkpoint that is whole; also say which newer ones are not."""
        complaints: list[str] = []
        for name in self.names():
            try:
                return Checkpoint(self.checkpoints / name), complaints
            except CheckpointError as error:
                complaints.append(str(error))
        return None, complaints

    def take_stock(self) -> tuple[Checkpoint | None, list[str]]:
        """Find the newest good checkpoint; set damaged ones aside, and clear away what a kill left half-written."""
        self.put_back()
        newest, complaints = self.newest()
        for name in self.names()[: len(complaints)]:  # those newer than the newest good one
            self.set_aside(name, "damaged")
        for entry in self.checkpoints.glob(".step-*"):
            shutil.rmtree(entry, ignore_errors=True)
        return newest, complaints

    def newest_step(self) -> int:
        """Give the step of the newest checkpoint, by its name; 0: there is none."""
        names = self.names()
        return (layout.step_of(names[0]) or 0) if names else 0

    def names(self) -> list[str]:
        """Name the checkpoints, newest first."""
        if not self.checkpoints.is_dir():
            return []
        return layout.newest_first(entry.name for entry in self.checkpoints.iterdir())

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        keeping: layout.Keeping,
        scores: dict[str, float] | None = None,
        shared: SharedSave | None = None,
    ) -> tuple[Path, int]:
        """Write a checkpoint, then drop those that need not stay; give its path and size."""
        written = write_checkpoint(self.checkpoints, step, snapshot, scores, shared)
        for name in keeping.to_prune(self.names(), self.scores() if keeping.best_by else {}):
            self._remove(name)
        return written

    def set_aside(self, name: str, why: str) -> None:
        """Take a checkpoint out of use without deleting it: `damaged-step-…`, `doubtful-step-…`."""
        aside = self.checkpoints / f"{why}-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(self.checkpoints / name, aside)

    def put_back(self) -> None:
        """Give a checkpoint its name again that a kill found while another was to take its place."""
        for entry in self.checkpoints.glob(layout.replaced("step-*")):
            name = entry.name.removeprefix(".").removesuffix(".old")
            if layout.step_of(name) is not None and not (self.checkpoints / name).exists():
                os.replace(entry, self.checkpoints / name)

    def _remove(self, name: str) -> None:
        """Delete a checkpoint; first its name, so that half of one is never found under it."""
        going = self.checkpoints / f".{name}.going"
        shutil.rmtree(going, ignore_errors=True)
        os.replace(self.checkpoints / name, going)
        shutil.rmtree(going, ignore_errors=True)

    def scores(self) -> dict[str, dict[str, float]]:
        """Give what was evaluated when each checkpoint was made, by its name."""
        found = {}
        for name in self.names():
            with contextlib.suppress(CheckpointError):  # a damaged one is nobody's best
                found[name] = read_manifest(self.checkpoints / name).scores
        return found


def _found(path: Path) -> set[str]:
    """Name what is in a directory, but for a spec that another machine of the job is just writing."""
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(f".{SPEC}.")}


def _locked(file: IO[bytes], how: int) -> bool:
    """Try to get a lock; tell whether this worked."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any], may_extend: bool) -> list[str]:
    """List what cannot change between two parts of one run."""
    lines = []
    if earlier["task"]["name"] != now["task"]["name"]:
        return [f"Task: {earlier['task']['name']} there, {now['task']['name']} now"]
    for title, group in (("Task field ", "fields"), ("", "recipe")):
        before = earlier["task"]["fields"] if group == "fields" else {**_BEFORE, **earlier["recipe"]}
        after = now["task"]["fields"] if group == "fields" else now["recipe"]
        lines += [
            f"{title}{name}: {before.get(name)!r} there, {after.get(name)!r} now"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and (name, after.get(name)) != _UNDECIDED
        ]
    for name in ("epochs", "steps"):
        before, after = earlier["length"].get(name), now["length"].get(name)
        if before != after:
            raised = before is not None and after is not None and after > before
            if not raised:
                lines.append(f"{name}: {before!r} there, {after!r} now (it can only be raised)")
            elif not may_extend:
                lines.append(f"{name}: {before!r} there, {after!r} now, and the Task's scheduler depends on it")
    return lines
