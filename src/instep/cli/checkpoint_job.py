"""Compute with a run's checkpoint, for `instep evaluate` and `instep predict`: find the Task, launch the ranks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from instep.cli.conduct import is_launcher, refuse_other_size
from instep.core.errors import EXIT_SPEC, RanksFailed, SpecError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.launch.failures import describe
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.processes import check_process_count
from instep.monitor.follow import Follower
from instep.train.checkpoint_job import CheckpointJob, RankMain, launched_job
from instep.train.data_choice import check_choice
from instep.train.source import TaskSource, refuse_while_loading
from instep.train.task import Task, check_fields
from instep.train.trained_run import TrainedRun
from instep.train.worker import joined_world
from instep.world.device import device_count
from instep.world.seeds import generators_restored
from instep.world.world import place_here

_OF_A_MESH = ("strategy", "mesh", "schedule", "microbatches", "reshard", "offload", "narrow_gather", "meta_init")
"""Options that go together: another strategy or mesh has none of the run's."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest:
    """Which checkpoint of which run is meant, and what for."""

    run: Path
    checkpoint: str | int = "last"
    data: Any = "eval"
    ema: bool | None = None
    """Whether to use the averaged weights; None: as the run evaluated."""
    task: Task | str | None = None
    """Where the Task is defined, FILE.py[:Class], or the Task itself; None: as the run says."""
    values: Sequence[str] = ()
    """name=value of its fields."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options in place of the run's; None: the run's own."""
    supervised: bool = False
    """Whether worker processes compute even where this one would do."""

    def prepare(self) -> PreparedJob:
        """Find the run, its Task and the checkpoint; raise if one of them is not there."""
        refuse_while_loading("instep.evaluate() or instep.predict()")
        trained = TrainedRun.open(self.run)
        name = trained.checkpoint_named(str(self.checkpoint))
        if isinstance(self.task, Task):
            task, source = self.task, TaskSource.of_value(self.task)
        else:
            task, path = trained.task(self.task, self.values)
            is_packaged = "." in type(task).__module__  # imported by this program: its file alone cannot be loaded
            source = TaskSource.of_value(task) if is_packaged else TaskSource.of_file(path, task)
        check_fields(task)
        given = {key: value for key, value in self.options.items() if value is not None}
        job = CheckpointJob(
            spec=_with_options(trained.spec, given),
            run_dir=str(self.run),
            checkpoint=name,
            data=check_choice(self.data),
            ema=self.ema,
        )
        return PreparedJob(task, source, job, place_here(), "processes" in given, self.supervised)


@dataclass(frozen=True)
class PreparedJob:
    """What is to be computed, by whom."""

    task: Task
    source: TaskSource
    job: CheckpointJob
    place: Place
    has_count: bool
    """Whether the number of processes was asked for."""
    supervised: bool

    def run(self, main: RankMain) -> dict[str, Any]:
        """Run `main` on every rank; return its result. Nothing is left of it, but the ranks' logs if they failed."""
        scratch, spec = Path(tempfile.mkdtemp(prefix="instep-job-")), self.job.spec
        job = dataclasses.replace(self.job, scratch=str(scratch))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
            is_rank = self.place.launched and not is_launcher(spec, processes, self.place)
            if is_rank and self.has_count:
                refuse_other_size(spec, processes, self.place)
            readers = ["rows"] if self.place.is_main and not spec.quiet else []
            with Follower(scratch, readers) as follower:
                if is_rank or (processes == 1 and not self.supervised):
                    with generators_restored(), joined_world(self.place, spec) as world:
                        return main(world, self.task, job)
                spec.mesh_of(processes)
                try:
                    return self._launch(main, job, follower.stream(sys.stderr if spec.json else sys.stdout))
                except RanksFailed as failed:
                    if failed.first.exit_code != EXIT_SPEC:
                        stack.pop_all()  # the message names the ranks' logs, which stay
                    raise

    def _launch(self, main: RankMain, job: CheckpointJob, output: TextIO) -> dict[str, Any]:
        """Run `main` on new processes."""
        launched = LaunchJob(
            *(launched_job, (main, self.source, job), job.spec, LogPlan(Path(job.scratch) / "logs")),
            stdout=output,
            stderr=sys.stderr,
            progress=lambda: -1,  # what the user's code raises would come again
        )
        results = launch(launched)
        return dict(results[min(results)])


def _with_options(spec: TrainSpec, given: Mapping[str, Any]) -> TrainSpec:
    """Return the run's spec with other options."""
    known = {option.name for option in options_of(TrainSpec) if option.in_evaluate}
    if unknown := sorted(given.keys() - known):
        raise SpecError(f"{unknown[0]} is not an option here. The options are {', '.join(sorted(known))}.")
    values = dict(given)
    if isinstance(count := values.get("processes"), str) and count.lstrip("-").isdigit():
        values["processes"] = int(count)
    reset = {"strategy", "mesh"} & values.keys()
    defaults = {option.name: option.default for option in options_of(TrainSpec) if reset and option.name in _OF_A_MESH}
    return dataclasses.replace(spec, **{**defaults, **values})


def from_python(call: Callable[[], Any]) -> Any:
    """Call something for a program: what ranks raised becomes one error with the whole report."""
    try:
        return call()
    except RanksFailed as failed:
        raise RanksFailed(failed.failures, describe(failed)) from None
