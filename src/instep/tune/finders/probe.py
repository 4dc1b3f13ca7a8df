"""Inside a rank: a short training of a Task, of which only the steps are looked at.

[Note: Nothing is left behind]
A probe trains on processes of its own, from the seed, in a scratch folder, so neither a model nor an optimizer of the
calling program is touched. The Task's own hooks are not called (they may write files, or send numbers somewhere), it
is not evaluated, and no checkpoint is written unless a later probe starts from it.

Ranks: all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.schema import StepRecord
from instep.train.loop import Loop
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.worker import joined_world, open_run
from instep.world.world import World, place_here

_SILENT = ("eval_data", "on_eval", "on_save", "save_files", "stop")
"""Methods that a probe has as every Task without its own has them."""


@dataclass(frozen=True)
class ProbeStep:
    """A step of a probe."""

    loss: float
    lr: float
    epoch: int
    num_samples: int
    grad_norm: float | None
    ended_s: float
    """By a clock of its own."""


@contextmanager
def probing(source: TaskSource, spec: TrainSpec) -> Iterator[tuple[World, Task]]:
    """Join the world of this rank, and load the Task. Called on all ranks."""
    place, task = place_here(), source.load()
    with joined_world(place, spec) as world:
        yield world, task


def train_probe(
    world: World,
    task: Task,
    spec: TrainSpec,
    run_dir: Path,
    methods: dict[str, Callable[..., Any]] | None = None,
    follow: Callable[[StepRecord], None] | None = None,
    saves: bool = False,
) -> list[ProbeStep]:
    """Train a copy of a Task, and return its steps on rank 0, nothing on others. Called on all ranks.

    `methods` replace the Task's own; `follow` is called with the record of each step, on rank 0.
    """
    steps: list[ProbeStep] = []

    def on_step(_task: Task, record: StepRecord) -> None:
        ended_s = time.perf_counter()
        steps.append(
            ProbeStep(record.loss, record.lr, record.epoch, record.num_samples, record.grad_norm, ended_s),
        )
        if follow is not None:
            follow(record)

    run_dir.mkdir(parents=True, exist_ok=True)
    probed = with_methods(task, {**(methods or {}), "on_step": on_step})
    with open_run(world, spec, RunDirectory(run_dir), type(task).__name__) as run:
        Loop(run, probed, saves=saves).run()
    return steps


def with_methods(task: Task, methods: dict[str, Callable[..., Any]]) -> Task:
    """Return a copy of a Task with other methods, each called with the Task first, and without hooks of its own."""
    kind, copied = type(task), copy.copy(task)
    silent = {name: getattr(Task, name) for name in _SILENT}
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **silent, **methods}
    object.__setattr__(copied, "__class__", type(kind.__name__, (kind,), namespace))  # a Task may be frozen
    return copied
