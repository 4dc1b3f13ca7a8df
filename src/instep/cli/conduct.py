"""Run a training: open its directory, launch ranks or be one, show the progress, return the result.

The command `instep train`, a Task's own `instep.main` and `instep.train` in a program all call `conduct`.
"""

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from instep.checkpoint.rundir import RunDirectory
from instep.cli.command import make_spec, print_json, say
from instep.core.errors import EnvironmentFailed, Interrupted, RanksFailed, SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest
from instep.core.topology import Place
from instep.core.trackers import require_trackers
from instep.events.read import was_stopped
from instep.events.write import log_restart
from instep.launch.failures import describe
from instep.launch.launcher import Launcher, LaunchJob, find_launcher
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.launch.tracking import Tracking
from instep.monitor.follow import Follower
from instep.monitor.progress import duration, metrics_text
from instep.train.directory import agree_on_directory, prepare_directory
from instep.train.nodes import job_request
from instep.train.precision import resolve_precision
from instep.train.profiling import reported_profile
from instep.train.result import Result
from instep.train.source import TaskSource, refuse_while_loading
from instep.train.task import Task, check_fields
from instep.train.worker import joined_world, launched_main, placed_main, worker_main
from instep.world.device import device_count
from instep.world.seeds import generators_restored
from instep.world.world import judge_place, place_here


def train_here(task: Task, **options: Any) -> Result:
    """Train a Task from a program or a notebook."""
    refuse_while_loading("instep.train()")
    if not isinstance(task, Task):
        raise SpecError(
            f"instep.train got a {type(task).__name__}, and needs an instance of a Task: Digits(), for instance."
        )
    try:
        return conduct(task, make_spec(TrainSpec, options), None)
    except RanksFailed as failed:
        raise RanksFailed(failed.failures, describe(failed)) from None


def conduct(
    task: Task, spec: TrainSpec, file: Path | None, supervised: bool = False, command: Sequence[str] = ()
) -> Result:
    """Train a Task in the world that this process was launched in, in this process, or in new ones.

    `file` is where the Task can be loaded from; without one it is pickled. `supervised` asks for worker processes even
    where this one would do. `command` is the command line, if there is one, for the message that says how to continue.
    """
    if spec.hosts:
        raise SpecError(f"hosts={spec.hosts} is for the command: instep train TASK.py --hosts {spec.hosts}")
    check_fields(task)
    require_trackers(spec.trackers)
    place = place_here()
    spec = resolve_precision(spec, place.device)
    launcher = find_launcher(spec)
    if not launcher.is_cluster:
        processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
        for text in judge_place(place, processes, spec.max_nodes):
            say(f"notice: {text}")
        if place.launched and not is_launcher(spec, processes, place):
            refuse_other_size(spec, processes, place)
            return _be_a_rank(task, spec, place, command)
        if processes == 1 and spec.max_nodes == 1 and not supervised:
            return _be_a_rank(task, spec, place, command)
        spec.check_world(processes * spec.min_nodes)
    spec = launcher.prepare(spec, place)
    source = TaskSource.of_file(file, task) if file is not None else TaskSource.of_value(task)
    return _launch_ranks(task, spec, source, launcher, place, command)


def _start(
    directory: RunDirectory,
    task: Task,
    spec: TrainSpec,
    source: TaskSource,
    launcher: Launcher,
    output: TextIO,
    stop: StopRequest,
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
        stop=stop,
        progress=directory.progress,
        on_restart=partial(log_restart, directory.path),
        run_dir=path,
        request=job_request(task, spec),
        meet=directory.claim,
    )
    return launcher.run(job)


def is_launcher(spec: TrainSpec, processes: int, place: Place) -> bool:
    """Return whether a scheduler started this process to launch the ranks of a node, not to be one."""
    if place.launcher == "torchrun":
        return False
    return bool(spec.rdzv_endpoint) or (place.launcher == "slurm" and place.world_size == 1 and processes > 1)


def _launch_ranks(
    task: Task, spec: TrainSpec, source: TaskSource, launcher: Launcher, place: Place, command: Sequence[str]
) -> Result:
    """Train on new processes, and watch them from this one; of several launchers only the first speaks."""
    directory, stop, speaks = prepare_directory(task, spec), StopRequest(), place.is_main
    again = _how_to_continue(spec, directory.path, place, command)
    try:
        if (done := _complete(directory, task, spec, speaks)) is not None:
            return done
        with (
            _interruptions_explained(directory, again),
            reported_profile(directory.path, spec, say if speaks else None),
            Tracking(directory.path, spec.trackers if speaks else (), say, spec.quiet),
            Follower(directory.path, _readers(spec, speaks)) as follower,
        ):
            output = follower.stream(sys.stderr if spec.json else sys.stdout)
            results = _start(directory, task, spec, source, launcher, output, stop)
        if not results:  # the other nodes have done everything
            if (done := _complete(directory, task, spec)) is not None:
                return done
            raise EnvironmentFailed(
                f"The other machines have ended the run in {directory.path} without this one, and not completed it. "
                "The same command continues."
            )
    finally:
        directory.unlock()
    result = Result.from_json(results[min(results)], task)
    return _finish(result, spec, again, stop, speaks)


def _be_a_rank(task: Task, spec: TrainSpec, place: Place, command: Sequence[str]) -> Result:
    """Train in this process, as a rank of the world it was launched in, or as the only one."""
    if place.attempt:  # the launcher restarts the same command: the run that it began with --fresh continues
        spec = dataclasses.replace(spec, fresh=False)
    stop = StopRequest()
    with generators_restored(), joined_world(place, spec) as world:
        directory = agree_on_directory(world, lambda: prepare_directory(task, spec))
        again = _how_to_continue(spec, directory.path, place, command)
        try:
            if (done := _complete(directory, task, spec, world.is_main)) is not None:
                return done
            with (
                _interruptions_explained(directory, again),
                reported_profile(directory.path, spec, say if world.is_main else None),
                Tracking(directory.path, spec.trackers if world.is_main else (), say, spec.quiet),
                Follower(directory.path, _readers(spec, world.is_main)) as follower,
                follower.quiet_at_prompts(),
            ):
                result = worker_main(world, task, spec, directory, place.attempt, stop=stop)
        finally:
            directory.unlock()
    return _finish(result, spec, again, stop, place.is_main)


def _how_to_continue(spec: TrainSpec, run_dir: Path, place: Place, command: Sequence[str]) -> str:
    """Return in words how an unfinished run is continued."""
    if place.launched:  # its launcher knows the command, this process only a part of it
        return "The same command continues it" + ("." if spec.run_dir else f", with --run-dir {run_dir}.")
    if not command:
        return f"To continue: instep.train(…, run_dir={str(run_dir)!r})"
    words = [word for word in command if word != "--fresh" and not word.startswith("--pause-at=")]
    if "--pause-at" in words:  # with it, the run would leave at once
        del words[(first := words.index("--pause-at")) : first + 2]
    return "To continue: " + shlex.join(words if spec.run_dir else [*words, "--run-dir", str(run_dir)])


@contextlib.contextmanager
def _interruptions_explained(directory: RunDirectory, again: str) -> Iterator[None]:
    """Say in the message of a KeyboardInterrupt what is left of the run."""
    try:
        yield
    except KeyboardInterrupt:
        names = directory.names()
        kept = (
            f"The newest checkpoint is {directory.checkpoints / names[0]}.\n{again}" if names else "Nothing was saved."
        )
        raise Interrupted(f"interrupted. {kept}") from None


def _finish(result: Result, spec: TrainSpec, again: str, stop: StopRequest, speaks: bool) -> Result:
    """Show a result, and how to continue a run that was asked to stop; raise Interrupted if Ctrl-C asked for it."""
    if speaks:
        _show(result, spec)
        if result.status == "preempted" and not spec.quiet:
            say(again)
    if result.status == "preempted" and stop.interrupted:
        interrupted = Interrupted(f"interrupted, and saved at step {result.steps} in {result.run_dir}. {again}")
        interrupted.saved = True
        raise interrupted
    return result


def _complete(directory: RunDirectory, task: Task, spec: TrainSpec, is_main: bool = True) -> Result | None:
    """Return the result of a run that is complete already, and report it."""
    data = directory.result()
    if data is None:
        return None
    result = Result.from_json(data, task)
    if not is_main:
        return result
    if not spec.quiet:
        say(f"{directory.path} is complete: nothing is left to do. --fresh starts over, more --epochs continue it.")
    return _show(result, spec)


def _show(result: Result, spec: TrainSpec) -> Result:
    """Print the result of a training: for a person, and as one line of JSON if asked for."""
    if not spec.quiet:
        early = ", stopped early by the Task" if was_stopped(Path(result.run_dir)) else ""
        parts = [
            f"{result.status}{early}: {plural(result.steps, 'step')}",
            f"loss {result.loss:.4g}",
            metrics_text(result.metrics),
        ]
        say("  ".join(filter(None, parts)) + f"  ({duration(result.wall_s)})\n{result.run_dir}")
    if spec.json:
        print_json(result.to_json())
    return result


def _readers(spec: TrainSpec, speaks: bool) -> list[str]:
    """Return the names of the readers of this run's events."""
    return ["terminal"] if speaks and not spec.quiet else []


def refuse_other_size(spec: TrainSpec, processes: int, place: Place) -> None:
    """Raise SpecError if `-n` contradicts the world that another launcher has launched."""
    if processes not in (1, place.world_size, place.local_world_size):
        raise SpecError(
            f"-n {spec.processes} contradicts the world that {place.launcher} launched, which has {place.world_size} "
            f"processes. Leave -n out: {place.launcher} decides."
        )
