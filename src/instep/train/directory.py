"""The run directory of a training and the checkpoint to continue from: one process decides, all ranks follow.

Ranks: `prepare_directory` one (the launcher, or rank 0); `agree_on_…` all.
"""

import dataclasses
import re
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError
from instep.core.spec import TrainSpec
from instep.events.schema import NoticeRecord
from instep.events.write import EventLog
from instep.train.source import file_of
from instep.train.task import Task, depends_on_num_steps, field_names
from instep.world.world import World


def describe_task(task: Task) -> dict[str, Any]:
    """Return a Task's name, its fields as plain values, and the file that defines it, if there is one."""
    values = {name: getattr(task, name) for name in field_names(type(task))}
    file = file_of(type(task))
    return {
        "name": type(task).__name__,
        "fields": {name: plain_value(value) for name, value in values.items()},
        "file": None if file is None else str(file),
    }


def plain_value(value: Any) -> Any:
    """Return a field's value in a form that is the same in every process."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def describe_run(task: dict[str, Any], spec: TrainSpec) -> dict[str, Any]:
    """Return what spec.json holds."""
    return {
        "task": task,
        "recipe": spec.recipe(),
        "length": {"epochs": spec.resolved_epochs(), "steps": spec.steps},
        "spec": dataclasses.asdict(spec),
    }


def open_directory(name: str, spec: TrainSpec) -> RunDirectory:
    """Open the run directory that the spec names, or make a new one."""
    if spec.run_dir is None:
        return RunDirectory.create(name)
    return RunDirectory.open(Path(spec.run_dir), spec.fresh, job_of(spec))


def job_of(spec: TrainSpec) -> str:
    """Return the name of the job whose launchers, one on each node, share a run directory; empty: there is only one."""
    return f"the job {spec.rdzv_id or 'instep'} at {spec.rdzv_endpoint}" if spec.max_nodes > 1 else ""


def prepare_directory(task: Task, spec: TrainSpec) -> RunDirectory:
    """Open or make the run directory, lock it, and write spec.json, or check that it describes the same run."""
    directory = open_directory(type(task).__name__.lower(), spec)
    directory.lock(job_of(spec))
    try:
        directory.write_spec(describe_run(describe_task(task), spec), may_extend=_may_extend(task, spec))
    except CheckpointError:
        directory.unlock()
        raise
    return directory


def check_directory(path: Path, task: Task, spec: TrainSpec) -> None:
    """Raise if a directory holds a run that this one cannot continue; write nothing."""
    RunDirectory(path).check_recipe(describe_run(describe_task(task), spec), may_extend=_may_extend(task, spec))


def _may_extend(task: Task, spec: TrainSpec) -> bool:
    """Return whether a run may be continued with more steps: not if its learning rates depend on their number."""
    return spec.lr_schedule in ("task", "constant") and not depends_on_num_steps(task)


def agree_on_directory(world: World, decide: Callable[[], RunDirectory]) -> RunDirectory:
    """Return the directory that rank 0 decides on, or raise its error on every rank. Called on all ranks."""
    answer: dict[str, str] = {}
    directory: RunDirectory | None = None
    if world.is_main:
        try:
            directory = decide()
            answer["path"] = str(directory.path)
        except CheckpointError as error:
            answer["error"] = str(error)
    answer = world.broadcast_object(answer)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return directory if directory is not None else RunDirectory(Path(answer["path"]))


def describe_own_loop(world: World, directory: RunDirectory, name: str, spec: TrainSpec, may_extend: bool) -> None:
    """Write spec.json for a loop of one's own, or check that it describes the same run. Called on all ranks."""

    def decide() -> RunDirectory:
        directory.write_spec(describe_run({"name": name, "fields": {}}, spec), may_extend=may_extend)
        return directory

    agree_on_directory(world, decide)


def agree_on_checkpoint(
    world: World, directory: RunDirectory, log: EventLog, except_for: Collection[str] = ()
) -> Checkpoint | None:
    """Return the newest good checkpoint that rank 0 finds, opened on every rank. Called on all ranks.

    `except_for` are the names of those that could not be restored.
    """
    newest: Checkpoint | None = None
    if world.is_main:
        newest, complaints = directory.recover(except_for)
        for complaint in complaints:
            log.write(NoticeRecord(text=complaint + " An older checkpoint is used."))
    return open_on_all_ranks(world, directory, newest)


def open_on_all_ranks(world: World, directory: RunDirectory, newest: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that rank 0 has verified, opened on every rank. Called on all ranks."""
    name, host = world.broadcast_object([newest.path.name if newest is not None else None, socket.gethostname()])
    if name is None:
        return None
    problem = ""
    if newest is None:
        try:
            newest = Checkpoint(directory.checkpoints / name, is_verified=True)  # by rank 0
            if host != socket.gethostname():  # another node's ranks verify it again, in shares
                newest.verify(newest.files[world.place.local_rank :: world.place.local_world_size])
        except CheckpointError as error:
            problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(world.all_gather_object(problem)) if text]
    if problems:
        raise CheckpointError(f"{problems[0]} Rank 0 can read it: is the run directory on a disk that all nodes share?")
    return newest
