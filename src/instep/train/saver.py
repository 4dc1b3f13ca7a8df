"""When to checkpoint, what goes into one, and where a run goes on from.

[Note: Saving beside the training]
A step waits only for the snapshot into host memory. Whether its weights are finite, its hashes, the files and the
rename that makes it a checkpoint follow in a thread, one save at a time. What became of a save is collected between two
later steps: a disk that refuses is told and tried again, anything else is raised there. The last one is waited for.

Where every rank holds the whole model, rank 0 alone decides and writes, and the others know nothing of it. Where a
model is spread, all ranks save the same step, each its share ([Note: Writing together]): rank 0's wish travels with the
step's sums, and what became of a save is still rank 0's to know and to tell.

Ranks: rank 0, or all of them where the model is spread; all read the same one.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from instep.checkpoint.background import Background
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import step_of
from instep.checkpoint.policy import FIRST_SAVE_S, RetentionPolicy, best_interval
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.sharded_save import SavePlanner, ShardedSave
from instep.checkpoint.shards import reshard
from instep.checkpoint.snapshot import FlatState, HostBuffer, Snapshot
from instep.checkpoint.write_reports import WriteReport
from instep.core.durations import Cadence
from instep.core.errors import CheckpointError, NumericsError, TaskError
from instep.core.spec import TrainSpec
from instep.events.schema import NoticeRecord, SaveFailedRecord, SaveRecord
from instep.events.write import EventLog
from instep.train.train_state import TrainState
from instep.world.determinism import platform_of
from instep.world.grid import Grid
from instep.world.world import World

_RETRY_S = 30.0
"""How soon a save that failed is tried again."""


@dataclass(frozen=True)
class _Save:
    """One save on its way."""

    step: int
    snapshot: Snapshot
    shared: ShardedSave | None
    """None: this rank writes all of it."""
    scores: dict[str, float]
    begun: float
    stall_s: float


@dataclass(frozen=True)
class _Saved:
    """A save that is complete."""

    save: _Save
    path: Path
    num_bytes: int
    seconds: float


class Saver:
    """Keeps a run from being lost."""

    def __init__(self, grid: Grid, spec: TrainSpec, directory: RunDirectory, log: EventLog) -> None:
        world = grid.world
        self._directory = directory
        self._world = world
        self._is_partial = grid.mesh.pp > 1
        self._sharing = None if grid.mesh.has_whole_models else SavePlanner(grid)
        """None: every rank holds everything, and rank 0 saves alone."""
        self.spec = spec
        self._log = log
        self._is_main = world.is_main
        self._platform = platform_of(world.device)
        self._cadence = Cadence.parse("save_every", spec.save_every)
        self._interval_s = self._cadence.seconds or (FIRST_SAVE_S if self._cadence.between_failures_s else None)
        self._saved_at = time.monotonic()
        self._retry_at: float | None = None
        self._kept: dict[str, Any] = {}
        self._stage = HostBuffer()
        self._reserved = self._cadence == Cadence()  # nothing will be saved before the end, when nobody waits
        self._reserving = False
        self._background: Background[_Saved | None] = Background()
        self.trusted: int | None = None
        """The newest step whose state is beyond doubt, where the ranks are compared ([Note: Drift])."""
        self._best = self._best_so_far() if world.is_main else None
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this process has taken."""
        self.checkpoint = self._agree_on_checkpoint(world)
        """Where the run goes on from; None for a new one."""

    @property
    def step(self) -> int:
        """The steps that were made before this process began."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the checkpoint tells of the run so far."""
        return dict(self.checkpoint.part("progress")) if self.checkpoint is not None else {}

    @property
    def moved(self) -> str:
        """What of the platform is not what it was when the checkpoint was written, in words; empty: nothing."""
        before = dict(self.checkpoint.part("platform")) if self.checkpoint and "platform" in self.checkpoint else {}
        changed = [name for name, value in before.items() if self._platform.get(name) != value]
        return ", ".join(f"{name} {self._platform.get(name)} instead of {before[name]}" for name in changed)

    def keep(self, name: str, thing: Any) -> None:
        """Checkpoint a thing that has state_dict and load_state_dict, and restore it now."""
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise TaskError(f"keep({name}=…): a {type(thing).__name__} has no state_dict and load_state_dict.")
        if self._is_partial and _has_nameless_tensors(thing.state_dict()):
            raise TaskError(
                f"keep({name}=…): its state has tensors in a list. The stages of a pipeline hold different ones, which "
                "only their names could tell apart: keep them in a dict, by the parameters' names."
            )
        self._kept[name] = thing
        if self.checkpoint is not None and f"kept-{name}" in self.checkpoint:
            thing.load_state_dict(self._read_kept(self.checkpoint, name, thing))

    def _read_kept(self, checkpoint: Checkpoint, name: str, thing: Any) -> Any:
        if self._sharing is None:
            return checkpoint.part(f"kept-{name}")
        return reshard(checkpoint.stored(f"kept-{name}"), thing.state_dict(), self._is_partial)

    def restore_rng(self) -> None:
        """Bring the global generators where they were."""
        if self.checkpoint is None:
            return
        rng = self.checkpoint.part("rng")
        random.setstate(rng["python"])
        kind, keys, *rest = rng["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
        torch.set_rng_state(rng["torch"])

    def wants(self) -> bool:
        """Tell whether this rank would have all of them save together: rank 0, by its clock."""
        return self._sharing is not None and self._is_main and self._is_time()

    def is_due(self, step: int, scores: Mapping[str, float], is_asked: bool) -> bool:
        """Tell whether the time for a checkpoint has come; `scores`: this step's evaluation, if there was one.

        `is_asked`: whether the ranks agreed in this step that one of them `wants` it. Called on all ranks.
        """
        if self._cadence.steps is not None and step % self._cadence.steps == 0:
            return True
        if self._sharing is None:
            return self._is_time() or self._is_best(scores)
        if is_asked or not (scores and self._keeping.best_by):
            return is_asked
        return bool(
            self._world.broadcast_object(self._is_best(scores))
        )  # rank 0 alone knows what became of earlier ones

    def _is_time(self) -> bool:
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return self._interval_s is not None and now - self._saved_at >= self._interval_s

    def is_saved(self, step: int) -> bool:
        """Tell whether a step's checkpoint was taken, and is not known to have failed. Called on all ranks."""
        is_saved = self.saved_step == step
        return is_saved if self._sharing is None else bool(self._world.broadcast_object(is_saved))

    def save(
        self,
        step: int,
        trained: list[TrainState],
        progress: Mapping[str, Any],
        scores: Mapping[str, float],
        may_skip: bool,
    ) -> None:
        """Take a snapshot of this moment, and have it written ([Note: Saving beside the training]).

        `may_skip`: not if the last one is still being written. Called on all ranks.
        """
        if self._sharing is None and not self._is_main:
            return
        begun = time.monotonic()
        if may_skip and self._is_busy():
            self._tell(f"the checkpoint of step {step} is skipped: the last one is still being written")
            self._saved_at = begun
            return
        self._collect()
        parts = self._flat_state(trained, progress)
        shared = self._sharing.begin(parts) if self._sharing is not None else None
        snapshot = self._stage.take(parts, shared.share if shared is not None else None)
        self._saved_at = time.monotonic()
        save = _Save(step, snapshot, shared, dict(scores), begun, self._saved_at - begun)
        self.saved_step, self._retry_at, self._reserved = step, None, True
        if self._keeping.best_by in scores:
            self._best = max(self._best or -math.inf, self._value(scores))
        self._background.start(partial(self._write, save))

    def _is_busy(self) -> bool:
        """Tell whether a checkpoint is still being written, on any rank that writes. Called on all that do."""
        is_busy = self._background.busy and not self._reserving
        return is_busy if self._sharing is None else self._sharing.any(is_busy)

    def _tell(self, text: str) -> None:
        if self._is_main:
            self._log.write(NoticeRecord(text=text))

    def look(self, trained: list[TrainState]) -> None:
        """See what became of a save, if it has ended since; called between steps, on all ranks."""
        if self._background.done:
            self._collect()
        elif not self._reserved and (self._is_main or self._sharing is not None):
            self._reserved = self._reserving = True  # after the first step: now the optimizer has its state
            parts = self._flat_state(trained, {})
            share = self._sharing.plan(parts).shares[self._world.rank] if self._sharing is not None else None
            self._background.start(partial(_reserve, self._stage.allocation(parts, share)))

    def finish(self) -> None:
        """Wait for the save that is on its way; raise if it failed, for there is no later one."""
        if (error := self._collect()) is not None:
            raise CheckpointError(f"{error} Then run the same command again: it goes on from the newest checkpoint.")

    def close(self) -> None:
        """Wait for the save that is on its way, after an error that is worth more than what becomes of it.

        Issues no collective; other ranks may be gone, and are not waited for as long as otherwise.
        """
        if self._sharing is not None:
            self._sharing.timeout.shorten()
        try:
            self._collect()
        except NumericsError as error:
            self._tell(str(error))

    def doubt(self, since: int) -> list[str]:
        """Set the checkpoints of steps after `since` aside, also one on its way; name them. Issues no collective."""
        self.close()  # a save that ended after this would stand there as if it were good
        doubtful = [name for name in self._directory.names() if (step_of(name) or 0) > since]
        for name in doubtful:
            self._directory.set_aside(name, "doubtful")
        return doubtful

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """Tell whether an evaluation is the best so far by the metric that the spec names."""
        keeping = self._keeping
        if keeping.best_by is None or not scores:
            return False
        if keeping.best_by not in scores:
            raise TaskError(
                f"keep_best={self.spec.keep_best}: there is no such metric. This Task has {', '.join(scores)}."
            )
        return self._best is None or self._value(scores) > self._best

    def _value(self, scores: Mapping[str, float]) -> float:
        """What an evaluation is worth by the metric that the spec names; more is better."""
        return scores[self._keeping.best_by or ""] * self._keeping.sign

    def _best_so_far(self) -> float | None:
        best = self._keeping.best_of(self._directory.scores())
        return None if best is None else best[1] * self._keeping.sign

    @property
    def _keeping(self) -> RetentionPolicy:
        keeping = RetentionPolicy.from_options(self.spec.keep, self.spec.keep_every, self.spec.keep_best)
        return replace(keeping, trusted=self.trusted)

    def _write(self, save: _Save) -> _Saved | None:
        """Write a snapshot, or this rank's share of one, unless its weights are worthless; beside the training."""
        worthless = ""
        for part, tensors in save.snapshot.tensors.items():
            if part.startswith("model") and not all(map(_is_finite, tensors.values())):
                worthless = f"the weights of step {save.step} are not finite, so no checkpoint is made. {self.newest()}"
        if self._is_main and worthless:
            raise NumericsError(worthless)
        if self._is_main:
            path, num_bytes = self._directory.save(save.step, save.snapshot, self._keeping, save.scores, save.shared)
            return _Saved(save, path, num_bytes, time.monotonic() - save.begun)
        assert save.shared is not None
        if worthless:
            save.shared.refuse(self._directory.checkpoints, save.step, WriteReport(problem="weights", text=worthless))
        else:
            save.shared.write(self._directory.checkpoints, save.step, save.snapshot)
        return None

    def _collect(self) -> CheckpointError | None:
        """Wait for the save on its way and note what became of it; give the error of a disk that refused."""
        step = self.saved_step or 0
        try:
            saved = self._background.collect()
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._best = self._best_so_far()
            self._retry_at, self.saved_step = time.monotonic() + _RETRY_S, None
            self._log.write(SaveFailedRecord(step=step, error=str(error), retry_s=_RETRY_S))
            return error
        if saved is not None:
            save, seconds = saved.save, round(saved.seconds, 6)
            self._log.write(
                SaveRecord(
                    step=save.step,
                    path=str(saved.path),
                    num_bytes=saved.num_bytes,
                    seconds=seconds,
                    stall_s=round(save.stall_s, 6),
                )
            )
            self._choose_interval(save.stall_s, seconds)
        self._reserving = False
        return None

    def _choose_interval(self, stall_s: float, write_s: float) -> None:
        assumed, before = self._cadence.between_failures_s, self._interval_s
        if assumed is None or before is None:
            return
        self._interval_s = best_interval(stall_s, write_s, assumed)
        if not 0.5 <= self._interval_s / before <= 2:  # said again when it changes by much
            self._log.write(
                NoticeRecord(
                    text=f"save_every=auto: a save holds training up for {stall_s * 1000:.0f} ms and takes "
                    f"{write_s:.1f} s in all; for a failure every {assumed / 3600:.3g} h one every "
                    f"{self._interval_s:.0f} s costs least"
                )
            )

    def newest(self) -> str:
        """Name the newest checkpoint, for a message."""
        names = self._directory.names()
        return (
            f"The last checkpoint: {self._directory.checkpoints / names[0]}."
            if names
            else "There is no checkpoint yet."
        )

    def _flat_state(self, trained: list[TrainState], progress: Mapping[str, Any]) -> FlatState:
        # Rank 0 may keep more than the others: a Task's on_step runs on rank 0 only.
        return FlatState.of(self._state(trained, progress), uneven=[f"kept-{name}" for name in self._kept])

    def _state(self, trained: list[TrainState], progress: Mapping[str, Any]) -> dict[str, Any]:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        state: dict[str, Any] = {}
        for each in trained:
            state |= each.state()
        state |= {f"kept-{name}": thing.state_dict() for name, thing in self._kept.items()}
        if not self._is_main:  # what follows is the same on all ranks, or rank 0's
            return {part: tree for part, tree in state.items() if not part.startswith("scheduler")}
        numpy_state = (kind, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest)
        state["rng"] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
        state["progress"] = dict(progress)
        state["platform"] = self._platform
        state["spec"] = asdict(self.spec)
        return state

    def _agree_on_checkpoint(self, world: World) -> Checkpoint | None:
        """Find the newest good checkpoint on rank 0, and have every rank take that one. Called on all ranks."""
        newest: Checkpoint | None = None
        if world.is_main:
            newest, complaints = self._directory.recover()
            for complaint in complaints:
                self._log.write(NoticeRecord(text=complaint + " An older checkpoint is used."))
        name, host = world.broadcast_object([newest.path.name if newest is not None else None, socket.gethostname()])
        if name is None:
            return None
        problem = ""
        if newest is None:
            try:
                newest = self._open_here(world, name, is_verified=host == socket.gethostname())
            except CheckpointError as error:
                problem = str(error)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(world.all_gather_object(problem)) if text]
        if problems:
            raise CheckpointError(
                f"{problems[0]} Rank 0 can read it: is the run directory on a disk that all nodes share?"
            )
        return newest

    def _open_here(self, world: World, name: str, is_verified: bool) -> Checkpoint:
        """Open a checkpoint that rank 0 has verified; on another machine its ranks verify it again, in shares."""
        checkpoint = Checkpoint(self._directory.checkpoints / name, is_verified=True)
        if not is_verified:
            checkpoint.verify(checkpoint.files[world.place.local_rank :: world.place.local_world_size])
        return checkpoint


def _has_nameless_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_has_nameless_tensors, tree.values()))
    if isinstance(tree, list | tuple):
        return any(isinstance(item, torch.Tensor) or _has_nameless_tensors(item) for item in tree)
    return False


def _is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds only finite numbers; by its extremes, ten times as fast as one by one."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no extremes of its own
        tensor = tensor.float()
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _reserve(reserve: Callable[[], None]) -> None:
    """Get memory before it is needed; where there is none, or none that can be pinned, the first save will tell."""
    with contextlib.suppress(RuntimeError, MemoryError):
        reserve()
