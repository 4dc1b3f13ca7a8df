"""Conduct a training from the person's side: settle, launch or join, show, return.

The command `instep train`, a Task's own `instep.main` and `instep.train` in a program all come here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from instep.checkpoint.rundir import RunDirectory
from instep.cli.options import make_spec
from instep.core.errors import EnvironmentFailed, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.launch.launcher import Launcher, LaunchJob, find_launcher
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.monitor.progress import duration, metrics_text
from instep.monitor.terminal import TerminalDisplay
from instep.train.directory import agree_on_directory, settle_directory
from instep.train.nodes import job_request
from instep.train.precision import resolve_precision
from instep.train.result import Result
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.worker import launched_main, placed_main, process_settings, worker_main
from instep.world.world import World, judge_place, place_here


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
    if spec.hosts:
        raise SpecError(f"hosts={spec.hosts} is for the command: instep train TASK.py --hosts {spec.hosts}")
    place = place_here()
    spec = resolve_precision(spec, place.device)
    launcher = find_launcher(spec)
    if not launcher.is_cluster:
        processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), torch.cuda.device_count())
        for text in judge_place(place, processes, spec.max_nodes):
            say(f"notice: {text}")
        if place.launched and not _is_launcher(spec, processes, place):
            _refuse_other_size(spec, processes, place)
            return _be_a_rank(task, spec, place)
        if processes == 1 and spec.max_nodes == 1 and not supervised:
            return _be_a_rank(task, spec, place)
        spec.check_world(processes * spec.min_nodes)
    spec = launcher.prepare(spec, place)
    return _launch_ranks(task, spec, _source(file, task), launcher, speaks=place.is_main)


def _source(file: Path | None, task: Task) -> TaskSource:
    return TaskSource.of_file(file, task) if file is not None else TaskSource.of_value(task)


def _start(
    directory: RunDirectory, task: Task, spec: TrainSpec, source: TaskSource, launcher: Launcher, output: TextIO
) -> dict[int, Any]:
    """Start the ranks, and return their results."""
    # Elsewhere a relative path would mean another folder.
    path = directory.path.absolute() if launcher.is_cluster else directory.path
    job = LaunchJob(
        *(launched_main, (source, spec, str(path)), spec, LogPlan(directory.path / "logs", split=False)),
        placed_entry=placed_main,
        stdout=output,
        stderr=sys.stderr,
        preemptable=True,
        progress=directory.newest_step,
        run_dir=path,
        request=job_request(task, spec),
        meet=directory.meet,
    )
    return launcher.run(job)


def _is_launcher(spec: TrainSpec, processes: int, place: Place) -> bool:
    """Tell whether a scheduler started this process to launch the ranks of a node, not to be one."""
    if place.launcher == "torchrun":
        return False
    return bool(spec.rdzv_endpoint) or (place.launcher == "slurm" and place.world_size == 1 and processes > 1)


def _launch_ranks(task: Task, spec: TrainSpec, source: TaskSource, launcher: Launcher, speaks: bool) -> Result:
    """Train on new processes, and watch them from this one; of a node's launchers only the first `speaks`."""
    directory = settle_directory(task, spec)
    try:
        done = _complete(directory, task, spec, speaks)
        if done is not None:
            return done
        with TerminalDisplay(directory.path, spec.quiet or not speaks) as display:
            output = display.stream(sys.stderr if spec.json else sys.stdout)
            results = _start(directory, task, spec, source, launcher, output)
        if not results:  # the other nodes have done everything
            return _complete(directory, task, spec) or _left_out(directory)
    finally:
        directory.unlock()
    result = Result.from_json(results[min(results)], task)
    return _show(result, spec) if speaks else result


def _left_out(directory: RunDirectory) -> NoReturn:
    raise EnvironmentFailed(
        f"The other machines have ended the run in {directory.path} without this one, and not completed it. "
        "The same command goes on."
    )


def _be_a_rank(task: Task, spec: TrainSpec, place: Place) -> Result:
    """Train as a rank of the world there is, be it of one."""
    if place.attempt:  # the launcher starts the same command again: what it began afresh goes on now
        spec = dataclasses.replace(spec, fresh=False)
    with (
        process_settings(spec, place.local_world_size),
        World.join(place, comm=spec.comm, tcp_timeout_s=spec.tcp_timeout_s) as world,
    ):
        directory = agree_on_directory(world, lambda: settle_directory(task, spec))
        try:
            done = _complete(directory, task, spec, world.is_main)
            if done is not None:
                return done
            quiet = spec.quiet or not world.is_main
            with TerminalDisplay(directory.path, quiet):
                result = worker_main(world, task, spec, directory, place.attempt)
        finally:
            directory.unlock()
    return _show(result, spec) if place.is_main else result


def _complete(directory: RunDirectory, task: Task, spec: TrainSpec, is_main: bool = True) -> Result | None:
    """Give the result of a run that is complete already, and say so."""
    found = directory.result()
    if found is None:
        return None
    result = Result.from_json(found, task)
    if not is_main:
        return result
    if not spec.quiet:
        say(f"{directory.path} is complete: nothing is left to do. --fresh starts over, more --epochs go on.")
    return _show(result, spec)


def _show(result: Result, spec: TrainSpec) -> Result:
    """Print how a training ended: for a person, and as the one line of JSON if asked for."""
    if not spec.quiet:
        words = [f"{result.status}: {result.steps} steps", f"loss {result.loss:.4g}", metrics_text(result.metrics)]
        say("  ".join(filter(None, words)) + f"  ({duration(result.wall_s)})\n{result.run_dir}")
    if spec.json:
        print(json.dumps(result.to_json()), flush=True)
    return result


def _refuse_other_size(spec: TrainSpec, processes: int, place: Place) -> None:
    if processes not in (1, place.world_size, place.local_world_size):
        raise SpecError(
            f"-n {spec.processes} contradicts the world that {place.launcher} launched, which has {place.world_size} "
            f"processes. Leave -n out: {place.launcher} decides."
        )


def say(text: str) -> None:
    """Write a line for the person, to standard error."""
    print(text, file=sys.stderr, flush=True)
