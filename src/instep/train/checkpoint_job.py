"""Evaluate a checkpoint, or predict with it: what each rank does.

Ranks: all, alike. The run's directory is only read; events go to a folder of the job.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import SpecError, TaskError
from instep.core.spec import TrainSpec
from instep.data.kinds import count_samples
from instep.events.schema import NoticeRecord, RowsRecord
from instep.events.write import EventLog
from instep.train.data_choice import choose_sets
from instep.train.evaluation import evaluate_sets, read_evaluation
from instep.train.metric_objects import prepare_metrics
from instep.train.predictions.columns import Column, arrays_of, join_columns
from instep.train.predictions.parts import PartWriter
from instep.train.reading import chunk_rows
from instep.train.restored import RestoredModel, restore_model
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.task_calls import HOW_TO_PREDICT, method_of, metrics_of, predictions_of
from instep.train.worker import joined_world
from instep.world.world import World, place_here

_REPORT_S = 0.5
RankMain = Callable[[World, Task, "CheckpointJob"], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """What to compute with a checkpoint of a run."""

    spec: TrainSpec
    run_dir: str
    checkpoint: str | None
    """The checkpoint's name; None: the newest good one."""
    data: Any
    """As `choose_sets` takes it."""
    ema: bool | None = None
    """Whether to use the averaged weights; None: as the run evaluated."""
    scratch: str = ""
    """The folder of the events."""
    parts: str = ""
    """The folder of the ranks' predictions."""
    allows_ragged: bool = True


def launched_job(attempt: int, main: RankMain, source: TaskSource, job: CheckpointJob) -> dict[str, Any]:
    """Run a rank that instep launched; return its result to the launcher."""
    del attempt  # nothing is continued: all is computed again
    with joined_world(place_here(), job.spec) as world:
        return main(world, source.load(), job)


def evaluate_rank(world: World, task: Task, job: CheckpointJob) -> dict[str, Any]:
    """Return the metrics of a checkpoint. Called on all ranks."""
    with _restored(world, task, job) as (restored, log):
        sets = choose_sets(task, job.data)
        total = sum(count_samples(dataset, task.collate, sys.maxsize, job.spec.seed) for dataset in sets.values())
        prepare_metrics(vars(task).values(), world.device)
        progress = _Progress(log, total, restored, job.spec)

        def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
            values = metrics_of(task, model, batch)
            progress.end_chunk()
            return values

        engine, step = restored.engine, restored.checkpoint.step
        scores = evaluate_sets(engine, restored.model, job.spec, step, metrics, sets, task.collate)
        return {"metrics": scores, **_describe(restored, total)}


def predict_rank(world: World, task: Task, job: CheckpointJob) -> dict[str, Any]:
    """Write this rank's predictions; return what all ranks have written. Called on all ranks."""
    with _restored(world, task, job) as (restored, log):
        sets = choose_sets(task, job.data)
        if len(sets) > 1:
            raise SpecError(f"{type(task).__name__} has several evaluation sets. Give --data {' or '.join(sets)}.")
        (dataset,) = sets.values()
        total = count_samples(dataset, task.collate, sys.maxsize, job.spec.seed)
        columns = _write_part(restored, task, job, dataset, _Progress(log, total, restored, job.spec))
        by_rank = world.all_gather_object([column.to_json() for column in columns])
        joined: dict[str, Column] = {}
        for fields in by_rank:
            joined = join_columns(joined, map(Column.from_json, fields))
        return {
            "columns": [column.to_json() for column in joined.values()],
            "num_parts": restored.engine.grid.data.world_size,
            "num_chunks": -(-total // chunk_rows(job.spec)),
            **_describe(restored, total),
        }


def _write_part(
    restored: RestoredModel, task: Task, job: CheckpointJob, dataset: Any, progress: _Progress
) -> list[Column]:
    """Compute this rank's chunks and write them, if this rank counts them; return their columns."""
    engine, model = restored.engine, restored.model
    chunks = read_evaluation(engine, [model], job.spec, restored.checkpoint.step, dataset, task.collate)
    folder = Path(engine.world.broadcast_object(job.parts))  # rank 0's: under another launcher it alone has made one
    writer = PartWriter(folder, engine.grid.data.rank, job.allows_ragged)
    with contextlib.closing(chunks), writer:
        for batch, num_rows in chunks:
            output = predictions_of(task, model, batch)
            if num_rows and engine.grid.is_counted:
                with _advised(task):
                    writer.write(arrays_of(output, num_rows))
            progress.end_chunk()
    return list(writer.columns.values())


@contextlib.contextmanager
def _advised(task: Task) -> Iterator[None]:
    """Say what to add to a Task without `predict` whose model returns what cannot be written."""
    try:
        yield
    except TaskError as error:
        if method_of(task, "predict") is not None:
            raise
        raise TaskError(
            f"{type(task).__name__} has no predict(), so its predictions are what its model returns when loss calls "
            f"it, and that cannot be written: {str(error).replace('predict returned', 'it returned')}\n{HOW_TO_PREDICT}"
        ) from error


@contextlib.contextmanager
def _restored(world: World, task: Task, job: CheckpointJob) -> Iterator[tuple[RestoredModel, EventLog | None]]:
    """Load the checkpoint; rank 0 keeps a log of this job."""
    log = EventLog(Path(job.scratch), 0) if world.is_main else None

    def notice(text: str) -> None:
        if log is not None:
            log.write(NoticeRecord(text=text))

    try:
        directory = RunDirectory(Path(job.run_dir))
        yield restore_model(world, task, job.spec, directory, job.checkpoint, notice, job.ema), log
    finally:
        if log is not None:
            log.close()


def _describe(restored: RestoredModel, total: int) -> dict[str, Any]:
    return {
        "step": restored.checkpoint.step,
        "checkpoint": str(restored.checkpoint.path),
        "num_samples": total,
        "world_size": restored.engine.world.world_size,
    }


class _Progress:
    """Reports how far all ranks are, by rank 0's chunks."""

    def __init__(self, log: EventLog | None, total_rows: int, restored: RestoredModel, spec: TrainSpec) -> None:
        self._log, self._total_rows = log, total_rows
        self._round_rows = chunk_rows(spec) * restored.engine.grid.data.world_size
        self._num_rows, self._next_s = 0, 0.0

    def end_chunk(self) -> None:
        """Note that this rank has computed one more chunk."""
        self._num_rows = min(self._num_rows + self._round_rows, self._total_rows)
        now = time.monotonic()
        if self._log is not None and now >= self._next_s:
            self._next_s = now + _REPORT_S
            self._log.write(RowsRecord(num_rows=self._num_rows, total_rows=self._total_rows))
