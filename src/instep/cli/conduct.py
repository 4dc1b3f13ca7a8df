"""Conduct a training from the person's side: settle, launch or join, show, return.

The command `instep train`, a Task's own `instep.main` and `instep.train` in a program all come here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from instep.checkpoint.rundir import RunDirectory
from instep.cli.options import make_spec
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.launch.local import LogPlan, launch
from instep.launch.preload import start_preload
from instep.launch.processes import check_process_count
from instep.monitor.terminal import TerminalDisplay
from instep.train.directory import agree_on_directory, settle_directory
from instep.train.result import Result
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.worker import launched_main, settle_process, worker_main
from instep.world.world import World, place_here


def train_here(task: Task, **options: Any) -> Result:
    """Train a Task from a program or a notebook."""
    if not isinstance(task, Task):
        raise SpecError(f"instep.train got a {type(task).__name__}; an instance of a Task is needed, Digits() say.")
    return conduct(task, make_spec(TrainSpec, options), None)


def conduct(task: Task, spec: TrainSpec, file: Path | None, supervised: bool = False) -> Result:
    """Train a Task in the world that this process was launched in, in this process, or in new ones.

    `file` is where the Task can be loaded from; without one it travels by value. `supervised` asks for
    worker processes also where one would do.
    """
    place = place_here()
    processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), torch.cuda.device_count())
    if place.launched:
        _refuse_other_size(spec, processes, place)
        return _be_one_of_many(task, spec, place)
    if processes == 1 and spec.max_nodes == 1 and not supervised:
        return _be_one_of_many(task, spec, place)
    start_preload()
    directory = settle_directory(task, spec)
    done = _complete(directory, task, spec)
    if done is not None:
        return done
    source = TaskSource.of_file(file, task) if file is not None else TaskSource.of_value(task)
    with TerminalDisplay(directory.path, spec.quiet) as display:
        output = display.stream(sys.stderr if spec.json else sys.stdout)
        logs = LogPlan(directory.path / "logs", split=False)
        results = launch(
            launched_main, (source, spec, str(directory.path)), spec, logs, stdout=output, stderr=sys.stderr
        )
    return Result.from_json(results[min(results)], task)


def _be_one_of_many(task: Task, spec: TrainSpec, place: Place) -> Result:
    """Train as a rank of the world there is, be it of one."""
    settle_process(spec, place.local_world_size)
    with World.join(place) as world:
        directory = agree_on_directory(world, lambda: settle_directory(task, spec))
        done = _complete(directory, task, spec, world.is_main)
        if done is not None:
            return done
        watching = TerminalDisplay(directory.path, spec.quiet) if world.is_main else contextlib.nullcontext()
        with watching:
            return worker_main(world, task, spec, directory)


def _complete(directory: RunDirectory, task: Task, spec: TrainSpec, is_main: bool = True) -> Result | None:
    """Give the result of a run that is complete already, and say so."""
    found = directory.result()
    if found is None:
        return None
    if is_main and not spec.quiet:
        say(f"{directory.path} is complete: nothing is left to do. --fresh starts over, more --epochs go on.")
    return Result.from_json(found, task)


def _refuse_other_size(spec: TrainSpec, processes: int, place: Place) -> None:
    if processes not in (1, place.world_size, place.local_world_size):
        raise SpecError(
            f"-n {spec.processes} contradicts the world that {place.launcher} launched, which has {place.world_size} "
            f"processes. Leave -n out: {place.launcher} decides."
        )


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line for the person, to standard error."""
    print(text, file=stream or sys.stderr, flush=True)
