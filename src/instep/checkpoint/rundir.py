"""The run directory: which run it holds, whether that may be continued, and its newest good checkpoint.

Ranks: one, rank 0 or the launcher; the other ranks get the result from it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from instep.checkpoint.files import Checkpoint, read_manifest, replace_synced, write_checkpoint
from instep.checkpoint.manifest import newest_first, replaced_name, step_of
from instep.checkpoint.policy import RetentionPolicy
from instep.checkpoint.snapshot import Snapshot
from instep.core.errors import CheckpointError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.events.read import last_step

if TYPE_CHECKING:  # it imports more of torch than a launcher needs
    from instep.checkpoint.sharded_save import ShardedSave

_JOB_MEETS_S = 5.0
SPEC, RESULT, FORKED = "spec.json", "result.json", "fork.json"
_BEFORE = {**{option.name: option.default for option in options_of(TrainSpec)}, "precision": "fp32"}
"""The values of recipe options before the options existed."""
_UNDECIDED = ("precision", "auto")
"""Only a node that trains can decide this value; elsewhere it contradicts nothing."""
_BEFORE_SPEC = {"events", "logs", "trackers", ".lock", ".world", "submit.sh"}
"""What is left of a run that was killed before its spec was written, or that waits in a queue."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[bytes] | None = None
        self._world: IO[bytes] | None = None
        self._aside: Path | None = None

    @classmethod
    def create(cls, name: str, root: Path = Path("runs")) -> RunDirectory:
        """Create a directory with an unused name for a new run."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for number in range(1000):
            path = root / (f"{name}-{stamp}" + (f"-{number}" if number else ""))
            with contextlib.suppress(FileExistsError):
                return cls._make(path, exist_ok=False)
        raise CheckpointError(f"{root} already has a thousand runs of this second. Give a --run-dir.")

    @classmethod
    def open(cls, path: Path, fresh: bool = False, job: str = "") -> RunDirectory:
        """Open the directory that the user named, for a new run or for one to continue; `job` as in `lock`."""
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file, and a run needs a directory. Give another --run-dir.")
        aside = None
        if path.exists() and _names_in(path) - _BEFORE_SPEC:
            if not (path / SPEC).exists():
                raise CheckpointError(
                    f"{path} is not empty and holds no {SPEC}, so it is not a run directory. Give another --run-dir."
                )
            old = cls(path)
            if fresh and not (job and old.owner() == job and old.is_locked()):  # else another node has moved it
                old.lock()  # refuse to move a run that is still training
                numbered = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
                aside = path.rename(next(unused for unused in numbered if not unused.exists()))
                old.unlock()
        directory = cls._make(path, exist_ok=True)
        directory._aside = aside
        return directory

    @classmethod
    def _make(cls, path: Path, exist_ok: bool) -> RunDirectory:
        try:
            path.mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            if isinstance(error, FileExistsError) and not exist_ok:
                raise
            raise CheckpointError(f"{path} cannot be created: {error.strerror}. Give another --run-dir.") from error
        return cls(path)

    def restore_previous(self) -> None:
        """Restore the run that `open` moved aside for this one, which never started."""
        if self._aside is not None:
            shutil.rmtree(self.path)
            self._aside.rename(self.path)
            self._aside = None

    def write_spec(self, description: Mapping[str, Any], may_extend: bool) -> None:
        """Check that the description continues the run in this directory, if there is one, and write it to spec.json.

        `description` has `task`, `recipe`, `length` (epochs, steps) and `spec`; `spec` alone may change freely. A run
        that becomes longer loses its result.
        """
        earlier = self.check_recipe(description, may_extend)
        if earlier is not None and earlier["length"] != description["length"]:
            (self.path / RESULT).unlink(missing_ok=True)
        replace_synced(self.path / SPEC, json.dumps({"version": 1, **description}, indent=1).encode())

    def check_recipe(self, description: Mapping[str, Any], may_extend: bool) -> dict[str, Any] | None:
        """Return the description of the run in this directory, or None; raise if this one cannot continue it."""
        if not (self.path / SPEC).exists() or not (self.names() or self.result() is not None):
            return None  # without a checkpoint or a result there is nothing to continue
        earlier = self.description()
        if differences := _differences(earlier, description, may_extend):
            raise CheckpointError(
                f"{self.path} holds a run with another recipe, which cannot be continued with this one:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nUse the same values, another --run-dir, or --fresh to start over (the old run is moved aside)."
            )
        return earlier

    def description(self) -> dict[str, Any]:
        """Read spec.json."""
        path = self.path / SPEC
        try:
            description = json.loads(path.read_bytes())
            parts = [description[name] for name in ("task", "recipe", "length", "spec")]
            if not all(isinstance(part, dict) for part in (*parts, description["task"]["fields"])):
                raise ValueError("a field is not an object")
            str(description["task"]["name"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Use another --run-dir, or --fresh.") from error
        return dict(description)

    def result(self) -> dict[str, Any] | None:
        """Return the result of the run; None if it is not complete."""
        path = self.path / RESULT
        if not path.exists():
            return None
        try:
            result = json.loads(path.read_bytes())
            if not isinstance(result["weights_sha256"], str):
                raise ValueError("it has no hash of the weights")
            return dict(result)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Delete it: the run then ends as its newest checkpoint says."
            ) from error

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result, the last file of a run, which marks it complete."""
        replace_synced(self.path / RESULT, json.dumps(result, indent=1).encode())

    @property
    def is_fork(self) -> bool:
        """Whether the run continues another run's checkpoint: without one it cannot begin ([Note: Forked runs])."""
        return (self.path / FORKED).exists()

    def mark_fork(self, origin: Mapping[str, Any]) -> None:
        """Note that the run continues another run's checkpoint, which is here."""
        replace_synced(self.path / FORKED, json.dumps(origin, indent=1).encode())

    def lock(self, job: str = "") -> None:
        """Lock the directory against other runs for as long as this process lives.

        The launchers of one `job` on several nodes share the lock; without a job it is exclusive.
        """
        if self._lock is not None:
            return
        file = (self.path / ".lock").open("a+b")
        deadline = time.monotonic() + (_JOB_MEETS_S if job else 0.0)
        while not _try_lock(file, fcntl.LOCK_EX):
            if job and self.owner() == job and _try_lock(file, fcntl.LOCK_SH):
                self._lock = file
                return
            if time.monotonic() >= deadline:  # nodes that start together may see the lock before its owner is written
                owner = self.owner()
                file.close()
                raise CheckpointError(
                    f"{self.path} is in use: {owner} trains there. Wait for it, end it, or give another --run-dir."
                )
            time.sleep(0.05)
        _write_content(file, job or f"process {os.getpid()}")
        if job and not _try_lock(file, fcntl.LOCK_SH):
            file.close()
            raise CheckpointError(f"{self.path} was locked by another run just now. Give another --run-dir.")
        self._lock = file

    def claim(self, store_id: str) -> None:
        """Claim the directory for the nodes that share one control store; raise if nodes of another store train here.

        The lock does not tell them apart: launchers of one job whose endpoint leads each of them to itself share it.
        """
        self._world = file = (self.path / ".world").open("a+b")
        deadline = time.monotonic() + _JOB_MEETS_S
        if _try_lock(file, fcntl.LOCK_EX):  # the first node; the others see its id as long as any of them is here
            _write_content(file, store_id)
        while not _try_lock(file, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(0.05)
        if (self.path / ".world").read_bytes().decode(errors="replace") != store_id:
            raise CheckpointError(
                f"{self.path} is in use by nodes of the same job that this node has not met. Does --rdzv-endpoint "
                "lead each node to itself? Give an address that means the same node on all of them."
            )

    def owner(self) -> str:
        """Return who trains here, or did so last."""
        path = self.path / ".lock"
        return (path.read_bytes().decode(errors="replace") if path.exists() else "") or "an unknown process"

    def is_locked(self) -> bool:
        """Return whether the directory is locked."""
        with (self.path / ".lock").open("a+b") as file:
            return not _try_lock(file, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Release the lock and the claim."""
        for file in filter(None, (self._world, self._lock)):
            file.close()
        self._world = self._lock = None

    def newest(self, except_for: Collection[str] = ()) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest good checkpoint, and what is wrong with newer ones, `except_for` those of some names."""
        complaints: list[str] = []
        for name in (name for name in self.names() if name not in except_for):
            try:
                return Checkpoint(self.checkpoints / name), complaints
            except CheckpointError as error:
                complaints.append(str(error))
        return None, complaints

    def recover(self, except_for: Collection[str] = ()) -> tuple[Checkpoint | None, list[str]]:
        """Return what `newest` does, after setting damaged checkpoints aside and deleting half-written ones."""
        self.restore_replaced()
        newest, complaints = self.newest(except_for)
        others = [name for name in self.names() if name not in except_for]
        for name in others[: len(complaints)]:  # those newer than the newest good one
            self.set_aside(name, "damaged")
        for entry in self.checkpoints.glob(".step-*"):
            shutil.rmtree(entry, ignore_errors=True)
        return newest, complaints

    def progress(self) -> int:
        """Return the step of the newest checkpoint, by its name; without one 0, or -1 if not one step was made."""
        names = self.names()
        return (step_of(names[0]) or 0) if names else 0 if last_step(self.path) else -1

    def names(self) -> list[str]:
        """Return the names of the checkpoints, newest first."""
        if not self.checkpoints.is_dir():
            return []
        return newest_first(entry.name for entry in self.checkpoints.iterdir())

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        retention: RetentionPolicy,
        scores: dict[str, float] | None = None,
        sharded: ShardedSave | None = None,
    ) -> tuple[Path, int]:
        """Write a checkpoint, then delete those that the policy does not keep; return its path and size."""
        written = write_checkpoint(self.checkpoints, step, snapshot, scores, sharded)
        for name in retention.to_prune(self.names(), self.scores() if retention.best_by else {}):
            # Renamed first, so that its name never refers to half of a checkpoint.
            shutil.rmtree(self._rename(name, f".{name}.going"), ignore_errors=True)
        return written

    def set_aside(self, name: str, why: str) -> None:
        """Take a checkpoint out of use without deleting it: `damaged-step-…`, `doubtful-step-…`."""
        self._rename(name, f"{why}-{name}")

    def _rename(self, name: str, new_name: str) -> Path:
        target = self.checkpoints / new_name
        shutil.rmtree(target, ignore_errors=True)
        return (self.checkpoints / name).replace(target)

    def restore_replaced(self) -> None:
        """Rename a checkpoint back if a kill came just when a new one of the same step replaced it."""
        for entry in self.checkpoints.glob(replaced_name("step-*")):
            name = entry.name.removeprefix(".").removesuffix(".old")
            if step_of(name) is not None and not (self.checkpoints / name).exists():
                os.replace(entry, self.checkpoints / name)

    def scores(self) -> dict[str, dict[str, float]]:
        """Return the evaluations in the checkpoints' manifests, by checkpoint name."""
        scores = {}
        for name in self.names():
            with contextlib.suppress(CheckpointError):  # a damaged one cannot be the best
                scores[name] = read_manifest(self.checkpoints / name).scores
        return scores


def _names_in(path: Path) -> set[str]:
    """Return the names in a directory, except a spec that another node of the job is writing."""
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(f".{SPEC}.")}


def _try_lock(file: IO[bytes], how: int) -> bool:
    """Try to lock a file; return whether it worked."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_content(file: IO[bytes], text: str) -> None:
    file.truncate(0)
    file.write(text.encode())
    file.flush()


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any], may_extend: bool) -> list[str]:
    """List what must not change when a run continues."""
    if earlier["task"]["name"] != now["task"]["name"]:
        return [f"Task: {earlier['task']['name']} there, {now['task']['name']} now"]
    fields = ("Task field ", earlier["task"]["fields"], now["task"]["fields"])
    recipes = ("", {name: _BEFORE[name] for name in now["recipe"]} | earlier["recipe"], now["recipe"])
    lines = [
        f"{title}{name}: {before.get(name)!r} there, {after.get(name)!r} now"
        for title, before, after in (fields, recipes)
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) and (name, after.get(name)) != _UNDECIDED
    ]
    for name in ("epochs", "steps"):
        before, after = earlier["length"].get(name), now["length"].get(name)
        is_raised = before is not None and after is not None and after > before
        if before != after and not (is_raised and may_extend):
            why = ", and the Task's scheduler depends on it" if is_raised else " (it can only be raised)"
            lines.append(f"{name}: {before!r} there, {after!r} now{why}")
    return lines
