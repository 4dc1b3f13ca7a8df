"""When to checkpoint, and how a checkpoint gets written while the training continues.

[Note: Saving beside the training]
A step waits only for the snapshot into host memory. Checking that the weights are finite, the hashes, the files and the
rename that makes it a checkpoint follow in a thread, one save at a time. The outcome of a save is collected between two
later steps: a disk that refuses is reported and tried again, any other error is raised there. The last save is waited
for.

Where every rank holds the whole model, rank 0 alone decides and writes, and the others know nothing of it. Where a rank
holds only a part, all ranks save the same step, each its share ([Note: Writing together]): rank 0's request is one of
the step's sums, and rank 0 alone knows, and reports, the outcome of a save.

Ranks: rank 0, or all of them where a rank holds only a part of the model; all read the same checkpoint.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from instep.checkpoint.manifest import step_of
from instep.checkpoint.policy import FIRST_SAVE_S, RetentionPolicy, best_interval
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.sharded_save import SavePlanner, ShardedSave
from instep.checkpoint.snapshot import FlatState, HostBuffer, Snapshot
from instep.checkpoint.write_reports import WriteReport
from instep.core.durations import Cadence
from instep.core.errors import (
    CheckpointError,
    CollectiveMismatch,
    EnvironmentFailed,
    NumericsError,
    UnfitCheckpoint,
)
from instep.core.spec import TrainSpec
from instep.events.schema import NoticeRecord, SaveFailedRecord, SaveRecord
from instep.events.write import EventLog
from instep.parallel.strategy import Strategy
from instep.train.checkpoint_part import RUN_PARTS, CheckpointPart
from instep.train.directory import agree_on_checkpoint

_NICE = 19
_RETRY_S = 30.0
"""How soon a save that failed is tried again."""


class Background:
    """A thread for one job at a time, which keeps its result or its error until it is collected.

    It spends its time in calls that release the GIL (SHA-256, write, fsync), at the lowest priority. It is not a
    daemon: the process ends only when the last save is complete.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Future[SaveRecord | None] = Future()

    @property
    def busy(self) -> bool:
        """Whether a job is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def done(self) -> bool:
        """Whether a job has ended and has not been collected."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, job: Callable[[], SaveRecord | None]) -> None:
        """Run a job; the previous one must have been collected."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(job, self._result), name="instep-save")
        self._thread.start()

    def collect(self) -> SaveRecord | None:
        """Wait for the job, then return its result or raise its error; None if there was no job."""
        if self._thread is None:
            return None
        self._thread.join()
        result, self._thread, self._result = self._result, None, Future()  # keep neither the result nor a traceback
        return result.result()

    @staticmethod
    def _run(job: Callable[[], SaveRecord | None], result: Future[SaveRecord | None]) -> None:
        with contextlib.suppress(OSError):  # optional: if it is not allowed, the thread competes with training
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            result.set_result(job())
        except BaseException as error:  # noqa: BLE001 - `collect` raises it
            result.set_exception(error)


class Saver:
    """Checkpoints a run, and restores it."""

    def __init__(
        self,
        strategy: Strategy,
        spec: TrainSpec,
        directory: RunDirectory,
        log: EventLog,
        unfit: Sequence[UnfitCheckpoint] = (),
    ) -> None:
        """`unfit` are checkpoints that could not be restored, so that an older one is tried."""
        world = strategy.grid.world
        self._directory, self._world, self._log = directory, world, log
        self._is_main = world.is_main
        self._sharing = SavePlanner(strategy.grid) if strategy.is_partial else None
        """None: every rank holds everything, and rank 0 saves alone."""
        self._keeping = RetentionPolicy.from_options(spec.keep, spec.keep_every, spec.keep_best)
        self._cadence = Cadence.parse("save_every", spec.save_every)
        self._interval_s = self._cadence.seconds or (FIRST_SAVE_S if self._cadence.between_failures_s else None)
        self._saved_at = time.monotonic()
        self._retry_at: float | None = None
        self._parts: dict[str, CheckpointPart] = {}
        self._buffer = HostBuffer()
        self._reserved = self._cadence == Cadence()  # nothing is saved before the end, when no step waits
        self._reserving = False
        self._background = Background()
        self.new_saves: list[SaveRecord] = []
        """Checkpoints that are complete, and were not reported to the Task."""
        self._best = self._best_so_far() if world.is_main else None
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this process has taken."""
        self._unfit = unfit
        self.checkpoint = agree_on_checkpoint(world, directory, log, [error.name for error in unfit])
        """What parts are restored from; None for a new run, and after `end_restore`."""
        self.step = self.checkpoint.step if self.checkpoint is not None else 0
        """The steps that were made before this process began."""
        if self.checkpoint is None and directory.is_fork:
            raise CheckpointError(
                f"{directory.path} continues another run, and no good checkpoint is left to continue from: it cannot "
                "start from the beginning. Copy the other run's checkpoint again, or start over elsewhere."
            )
        if unfit and self.checkpoint is None:  # so it is not this one checkpoint that is wrong
            raise CheckpointError(f"{unfit[0]} Use another --run-dir, or --fresh to start over.")

    def add(self, part: CheckpointPart) -> None:
        """Save a part from now on."""
        self._parts[part.name] = part

    def restore(self, *parts: CheckpointPart) -> None:
        """Save parts from now on, and restore them from the checkpoint, if there is one."""
        for part in parts:
            self.add(part)
            checkpoint = self.checkpoint
            if checkpoint is None or part.restore is None or (part.is_optional and part.name not in checkpoint.parts):
                continue
            problem = ""
            try:
                part.restore(checkpoint)
            except (OSError, MemoryError, torch.OutOfMemoryError, EnvironmentFailed, CollectiveMismatch):
                raise  # not the checkpoint's fault
            except Exception as error:  # noqa: BLE001 - whatever its content leads to; raised below, on all ranks
                problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            if problem := next(filter(None, self._world.all_gather_object(problem)), ""):
                raise UnfitCheckpoint(
                    checkpoint.path.name,
                    f"{checkpoint.path}: its part {part.name!r} cannot be restored: {problem.rstrip('. ')}. "
                    "Was the code changed since it was saved? If not, it is damaged.",
                )

    def end_restore(self) -> None:
        """Restore nothing from now on: the run has continued. Newer checkpoints that were unfit are set aside."""
        if self.checkpoint is not None and self._is_main:
            for error in self._unfit:
                self._directory.set_aside(error.name, "damaged")
                self._notice(f"{error} It is set aside, and {self.checkpoint.path.name} is used.")
        self.checkpoint, self._unfit = None, ()

    def wants(self) -> bool:
        """Return whether this rank would have all ranks save together: rank 0, by its clock."""
        return self._sharing is not None and self._is_main and self._is_time()

    def is_due(self, step: int, scores: Mapping[str, float], is_asked: bool, num_epochs: int) -> bool:
        """Return whether to save now; `scores`: this step's evaluation, if there was one.

        `is_asked`: whether the ranks agreed in this step that one of them `wants` it. `num_epochs`: how many epochs are
        over if one ends with this step, else 0. Called on all ranks.
        """
        if self._cadence.steps is not None and step % self._cadence.steps == 0:
            return True
        if self._cadence.epochs is not None and num_epochs and num_epochs % self._cadence.epochs == 0:
            return True
        if self._sharing is None:
            return self._is_time() or (bool(scores) and self._is_best(scores))
        if is_asked or not (scores and self._keeping.best_by):
            return is_asked
        # Rank 0 alone knows the outcome of earlier saves.
        return bool(self._world.broadcast_object(self._is_best(scores)))

    def _is_time(self) -> bool:
        if self._interval_s is None and self._retry_at is None:
            return False
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return self._interval_s is not None and now - self._saved_at >= self._interval_s

    def is_saved(self, step: int) -> bool:
        """Return whether a step's checkpoint was taken, and is not known to have failed. Called on all ranks."""
        is_saved = self.saved_step == step
        return is_saved if self._sharing is None else bool(self._world.broadcast_object(is_saved))

    def save(self, step: int, scores: Mapping[str, float], may_skip: bool) -> None:
        """Take a snapshot of all parts, and start writing it ([Note: Saving beside the training]).

        `may_skip`: not if the last one is still being written. Called on all ranks.
        """
        if self._sharing is None and not self._is_main:
            return
        begun = time.monotonic()
        is_busy = self._background.busy and not self._reserving
        if may_skip and (is_busy if self._sharing is None else self._sharing.any(is_busy)):
            self._notice(f"the checkpoint of step {step} is skipped: the last one is still being written")
            self._saved_at = begun
            return
        self._collect()
        parts = self._state()
        shared = self._sharing.begin(parts, self._directory.checkpoints, step) if self._sharing is not None else None
        snapshot = self._buffer.take(parts, shared.share if shared is not None else None)
        self._saved_at = time.monotonic()
        stall_s = self._saved_at - begun
        self.saved_step, self._retry_at, self._reserved = step, None, True
        if self._keeping.best_by is not None and self._keeping.best_by.name in scores:
            self._best = max(-math.inf if self._best is None else self._best, self._keeping.worth(scores))
        self._log.flush()  # a run that continues from this checkpoint does not make its steps again
        self._background.start(partial(self._write, step, snapshot, shared, dict(scores), begun, stall_s))

    def _state(self) -> FlatState:
        """Return what this rank saves; what is the same on all ranks, or rank 0's own, only on rank 0."""
        parts = sorted(self._parts.values(), key=lambda part: part.name in RUN_PARTS)
        own = [part for part in parts if self._is_main or part.on_all_ranks]
        return FlatState.of({part.name: part.save() for part in own}, [part.name for part in own if part.is_uneven])

    def _notice(self, text: str) -> None:
        if self._is_main:
            self._log.write(NoticeRecord(text=text))

    def check(self) -> None:
        """Collect a save that has ended; after the first step, reserve host memory. Called on all ranks."""
        if self._background.done:
            self._collect()
        elif not self._reserved and (self._is_main or self._sharing is not None):
            self._reserved = self._reserving = True  # after the first step: now the optimizer has its state
            parts = self._state()
            share = self._sharing.plan(parts).shares[self._world.rank] if self._sharing is not None else None
            self._background.start(self._buffer.allocation(parts, share))

    def finish(self) -> None:
        """Wait for the save that is being written; raise if it failed, for there is no later one."""
        if (error := self._collect()) is not None:
            raise CheckpointError(f"{error} Then run the same command again: it continues from the newest checkpoint.")

    def close(self) -> None:
        """Wait for the save that is being written, after an error that matters more than its outcome.

        Issues no collectives; other ranks may be gone, and are not waited for as long as otherwise.
        """
        if self._sharing is not None:
            self._sharing.timeout.shorten()
        try:
            self._collect()
        except NumericsError as error:
            self._notice(str(error))
        self._parts.clear()  # they hold on to models

    def trust(self, step: int) -> None:
        """Note that the state at a step is beyond doubt ([Note: Drift]); older checkpoints may be deleted."""
        self._keeping = self._keeping._replace(trusted=step)

    def set_aside(self, since: int) -> list[str]:
        """Set the checkpoints of steps after `since` aside, also one being written; return their names.

        Issues no collectives.
        """
        self.close()  # a save that ended after this would look good
        doubtful = [name for name in self._directory.names() if (step_of(name) or 0) > since]
        for name in doubtful:
            self._directory.set_aside(name, "doubtful")
        return doubtful

    def newest(self) -> str:
        """Return a sentence that names the newest checkpoint."""
        names = self._directory.names()
        if not names:
            return "There is no checkpoint yet."
        return f"The last checkpoint: {self._directory.checkpoints / names[0]}."

    def check_best(self, metrics: Collection[str]) -> None:
        """Raise TaskError if `keep_best` names none of these metrics."""
        if self._keeping.best_by is not None:
            self._keeping.best_by.check(metrics)

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """Return whether an evaluation is the best so far by the metric that the spec names."""
        if self._keeping.best_by is None or not scores:
            return False
        self.check_best(scores)
        return self._best is None or self._keeping.worth(scores) > self._best

    def _best_so_far(self) -> float | None:
        scores = self._directory.scores()
        best = self._keeping.best_of(scores)
        return None if best is None else self._keeping.worth(scores[best])

    def _write(
        self,
        step: int,
        snapshot: Snapshot,
        shared: ShardedSave | None,
        scores: dict[str, float],
        begun: float,
        stall_s: float,
    ) -> SaveRecord | None:
        """Write a snapshot, or this rank's share of one, unless its weights are not finite; runs in the thread."""
        models = [tensors for part, tensors in snapshot.tensors.items() if part.startswith("model")]
        problem = ""
        if not all(_is_finite(tensor) for tensors in models for tensor in tensors.values()):
            problem = f"the weights of step {step} are not finite, so no checkpoint is made. {self.newest()}"
        if self._is_main and problem:
            raise NumericsError(problem)
        if self._is_main:
            path, num_bytes = self._directory.save(step, snapshot, self._keeping, scores, shared)
            seconds = round(time.monotonic() - begun, 6)
            return SaveRecord(
                step=step, path=str(path), num_bytes=num_bytes, seconds=seconds, stall_s=round(stall_s, 6)
            )
        assert shared is not None
        if problem:
            shared.refuse(WriteReport(problem="weights", text=problem))
        else:
            shared.write(snapshot)
        return None

    def _collect(self) -> CheckpointError | None:
        """Wait for the save that is being written and log its outcome; return the error of a disk that refused."""
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
            self._log.write(saved)
            self.new_saves.append(saved)
            self._choose_interval(saved.stall_s, saved.seconds)
        self._reserving = False
        return None

    def _choose_interval(self, stall_s: float, write_s: float) -> None:
        assumed, before = self._cadence.between_failures_s, self._interval_s
        if assumed is None or before is None:
            return
        self._interval_s = best_interval(stall_s, write_s, assumed)
        if not 0.5 <= self._interval_s / before <= 2:  # reported again when it changes by much
            self._notice(
                f"save_every=auto: a save holds training up for {stall_s * 1000:.0f} ms and takes {write_s:.1f} s in "
                f"all; for a failure every {assumed / 3600:.3g} h one every {self._interval_s:.0f} s costs least"
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds only finite numbers; by its extremes, ten times as fast as one by one."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no extremes of its own
        tensor = tensor.float()
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
