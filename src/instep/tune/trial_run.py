"""The training of one trial: on processes of its own, in a run directory of its own, followed by its events.

To run trials somewhere else, write another subclass of `RunningTrial`; the search knows no more of a trial than that.

[Note: Trials in threads]
The process of a search launches every trial from a thread. The ranks are processes, forked from the forkserver, which
has torch imported: a trial that crashes takes nothing with it, and a short one does not pay for imports. Signals reach
the main thread only, so a trial is asked to stop by its `StopRequest`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from instep.core.errors import EnvironmentFailed, Interrupted
from instep.core.spec import TrainSpec
from instep.core.stop import StopRequest
from instep.events.read import EventTail, path_of, read_events
from instep.events.repeats import Repeats
from instep.launch.launcher import LaunchJob, find_launcher
from instep.launch.logs import LogPlan
from instep.launch.tracking import Tracking
from instep.train.directory import prepare_directory
from instep.train.nodes import job_request
from instep.train.source import TaskSource
from instep.train.task import Task
from instep.train.worker import launched_main, placed_main
from instep.tune.packing import TrialLoad
from instep.world.world import place_here

_UNUSED = ("step", "epoch")
"""Kinds of events that a search does not read while a trial runs."""


class Evaluation(NamedTuple):
    """An evaluation of a trial."""

    number: int
    """Counted from 1."""
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class TrialPlan:
    """What a trial trains."""

    number: int
    task: Task
    spec: TrainSpec
    source: TaskSource
    first_evaluation: int = 0
    """How many evaluations come before those of its run: those of the trial that it is a copy of."""

    def as_begun(self, run_dir: Path) -> TrialPlan:
        """Return the plan with the number of threads of the run in a directory, if there is one: part of its recipe."""
        path = run_dir / "spec.json"
        if not path.exists():
            return self
        try:
            threads = json.loads(path.read_bytes())["spec"]["threads"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(f"{path} cannot be read: {error!r}.") from error
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, threads=threads))

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        assert self.spec.run_dir is not None
        return Path(self.spec.run_dir)


class Evaluations:
    """The evaluations of a run, read from its events: each once, also if a restart made it again."""

    def __init__(self, run_dir: Path, processes: int, first: int = 0) -> None:
        """`first`: how many come before those of this run."""
        self.load = TrialLoad(processes)
        """What the training takes."""
        self._tail = EventTail(path_of(run_dir), without=_UNUSED)
        self._repeats = Repeats()
        self._count = first

    def poll(self) -> Iterator[Evaluation]:
        """Yield those that were written since the last call."""
        for event in self._tail.poll():
            self.load.take(event)
            if event["event"] == "eval" and not self._repeats.is_repeated(event):
                self._count += 1
                yield Evaluation(self._count, int(event["step"]), dict(event["metrics"]))


class RunningTrial(ABC):
    """A trial whose training was started, here or elsewhere. No method blocks."""

    def __init__(self, plan: TrialPlan) -> None:
        self.plan = plan
        processes = plan.spec.processes
        num_processes = processes if isinstance(processes, int) else 1
        self.evaluations = Evaluations(plan.run_dir, num_processes, plan.first_evaluation)

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether the training has ended, in whichever way."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the Result of a training that has ended; raise the error that ended it."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the training to save and leave."""

    @abstractmethod
    def kill(self) -> None:
        """End the training at once."""


class LocalTrial(RunningTrial):
    """A trial on this machine. See [Note: Trials in threads]."""

    def __init__(self, plan: TrialPlan, wake: Callable[[], object]) -> None:
        """Start the training; call `wake` when it has ended."""
        super().__init__(plan)
        self._stop = StopRequest()
        self._wake = wake
        self._result: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"instep-trial-{plan.number}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """Return the Result, or raise the error."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> None:
        """Ask all ranks to save after the step that they are in."""
        self._stop.request()

    def kill(self) -> None:
        """End all ranks, and wait until they are gone."""
        while self._thread.is_alive():
            self._stop.end()
            self._thread.join(0.5)

    def _run(self) -> None:
        try:
            self._result = train_trial(self.plan.task, self.plan.source, self.plan.spec, self._stop)
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the thread of the search
            self._error = Interrupted() if isinstance(error, KeyboardInterrupt) else error
        finally:
            self._wake()


def train_trial(task: Task, source: TaskSource, spec: TrainSpec, stop: StopRequest) -> dict[str, Any]:
    """Train a trial on this machine, or continue it, and return its Result."""
    directory = prepare_directory(task, spec)
    try:
        if (done := directory.result()) is not None:
            return done
        logs = directory.path / "logs"
        logs.mkdir(exist_ok=True)
        launcher = find_launcher(spec)
        spec = launcher.prepare(spec, place_here())
        with (logs / "launcher.log").open("a") as said, open(os.devnull, "w") as unused:
            job = LaunchJob(
                *(launched_main, (source, spec, str(directory.path)), spec, LogPlan(logs, split=False)),
                placed_entry=placed_main,
                stdout=unused,  # the ranks' logs have it
                stderr=said,
                preemptable=True,
                stop=stop,
                progress=directory.progress,
                run_dir=directory.path,
                request=job_request(task, spec),
                meet=directory.claim,
            )
            with Tracking(directory.path, spec.trackers, job.say, is_quiet=True):
                results = launcher.run(job)
        return dict(results[min(results)])
    finally:
        directory.unlock()


def measures(run_dir: Path, result: dict[str, Any]) -> dict[str, float]:
    """Return what a complete trial measured: its metrics, and the numbers that every training has."""
    measured = {"loss": result["loss"], "wall_s": result["wall_s"], "memory_bytes": 0.0, "num_parameters": 0.0}
    for event in read_events(run_dir):
        if event["event"] == "memory":
            peak = event.get("device_bytes") or event["host_bytes"]
            measured["memory_bytes"] = max(measured["memory_bytes"], float(peak))
        elif event["event"] == "plan":
            measured["num_parameters"] = float(event["num_parameters"])
    return {**measured, **result["metrics"]}
