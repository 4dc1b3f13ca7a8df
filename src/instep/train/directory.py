"""Which directory a training lives in: decided by one process, known to all.

Ranks: `settle_directory` one (the launcher, or rank 0); `agree_on_directory` all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError
from instep.core.spec import TrainSpec
from instep.train.task import Task, depends_on_num_steps, field_names
from instep.world.world import World


def describe_task(task: Task) -> dict[str, Any]:
    """Give a Task's name and its fields as plain values."""
    values = {name: getattr(task, name) for name in field_names(type(task))}
    return {"name": type(task).__name__, "fields": {name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    """Write a field's value so that the same one reads the same in another process."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def describe_run(task: dict[str, Any], spec: TrainSpec) -> dict[str, Any]:
    """Give all that spec.json holds."""
    return {
        "task": task,
        "recipe": spec.recipe(),
        "length": {"epochs": spec.resolved_epochs(), "steps": spec.steps},
        "spec": dataclasses.asdict(spec),
    }


def open_directory(name: str, spec: TrainSpec) -> RunDirectory:
    """Open the directory that was asked for, or make one."""
    if spec.run_dir is None:
        return RunDirectory.create(name)
    return RunDirectory.open(Path(spec.run_dir), spec.fresh, job_of(spec))


def job_of(spec: TrainSpec) -> str:
    """Name the job whose launching processes, one on each machine, share a run directory; empty: there is only one."""
    return f"the job {spec.rdzv_id or 'instep'} at {spec.rdzv_endpoint}" if spec.max_nodes > 1 else ""


def settle_directory(task: Task, spec: TrainSpec) -> RunDirectory:
    """Open or make the run's directory, keep others out, and write down, or check, what the run is."""
    directory = open_directory(type(task).__name__.lower(), spec)
    directory.lock(job_of(spec))
    try:
        directory.write_spec(describe_run(describe_task(task), spec), may_extend=not depends_on_num_steps(task))
    except CheckpointError:
        directory.unlock()
        raise
    return directory


def check_directory(path: Path, task: Task, spec: TrainSpec) -> None:
    """Refuse a directory whose run this one cannot continue; touch nothing."""
    RunDirectory(path).check_recipe(describe_run(describe_task(task), spec), may_extend=not depends_on_num_steps(task))


def agree_on_directory(world: World, decide: Callable[[], RunDirectory]) -> RunDirectory:
    """Decide on rank 0 and tell the others, also when it cannot be. Called on all ranks."""
    told: dict[str, str] = {}
    decided: RunDirectory | None = None
    if world.is_main:
        try:
            decided = decide()
            told["path"] = str(decided.path)
        except CheckpointError as error:
            told["error"] = str(error)
    told = world.broadcast_object(told)
    if "error" in told:
        raise CheckpointError(told["error"])
    return decided if decided is not None else RunDirectory(Path(told["path"]))
