"""Trials on a Ray cluster: each is one Ray task on the node that Ray chooses.

[Note: Trials on Ray]
The study and the scheduler stay where they are, in the process of the search, and Ray only places trials: a trial is a
Ray task that needs its processes times their threads as CPUs, and perhaps a part of a GPU. In it the trial is launched
as on any machine, with a keeper for each rank, restarts and hangs explained; its events, checkpoints and result are in
its run directory, on a disk that all nodes share, and the search reads them there. So `--on ray` changes nothing but
the place: spaces, samplers, `asha`, `pbt`, kills and the study are those of a search on one machine, and either may
continue what the other began.

Ray's own Tuner is not used, though it could be given our trials as functions. It would keep a second record of the
trials beside the study, and after a kill the two may disagree; its ASHA ends trials, ours continues them; its PBT
copies checkpoints that Ray wrote, and a trial here must be a run directory that `train`, `evaluate` and `watch` know.

Ray runs a task again whose node was lost, and the trial continues from its checkpoint. A wish to stop is a file, as
signals do not reach a task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from instep.core.errors import SpecError
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.processes import check_process_count
from instep.launch.ray import connected
from instep.launch.ray_tasks import RayTask, capacity, cluster_gpus
from instep.launch.signals import signals_restored
from instep.train.source import TaskSource
from instep.tune.folder import SearchFolder
from instep.tune.packing import Packing, Room
from instep.tune.place import TrialPlace
from instep.tune.trial_run import LocalTrial, RunningTrial, TrialPlan

_MARKS = ".stops"
_POLL_S = 0.2


class RayPlace(TrialPlace):
    """A Ray cluster. See [Note: Trials on Ray]."""

    def __init__(self, spec: TrainSpec, parallel: int | None, gpus_per_trial: float | None = None) -> None:
        super().__init__(spec, parallel, gpus_per_trial)
        if not isinstance(spec.processes, int):
            raise SpecError(
                f"processes={spec.processes} depends on a node's cores, and Ray chooses the node by the number of "
                "processes. Give a number: -n 2."
            )
        self._marks = Path()

    def share(self) -> tuple[TrainSpec, str]:
        """Set one thread for each process, unless it was told otherwise: Ray counts CPUs by them."""
        spec = dataclasses.replace(self.spec, threads=self.spec.num_threads or 1)
        each = f"{plural(_processes(spec), 'process', 'processes')} of {plural(spec.threads or 1, 'thread')}"
        return spec, f"Ray places the trials, each with {each}: {plural(_num_cpus(spec), 'CPU')}."

    @contextlib.contextmanager
    def opened(self, folder: SearchFolder) -> Iterator[None]:
        """Connect to the cluster."""
        self._marks = folder.path.absolute() / _MARKS
        self._marks.mkdir(exist_ok=True)
        cores = len(os.sched_getaffinity(0))
        with signals_restored(), connected(self.spec.address, max(cores, _num_cpus(self.spec))):
            self._check_room()
            yield

    def packing(self) -> Packing:
        """Return how many trials run at once: as many as the cluster has room for, unless it was told."""
        room = max(1, capacity(_num_cpus(self.spec), self._num_gpus(self.spec)))
        return Packing(self.parallel or room, Room(room, 0))

    def start(self, plan: TrialPlan, wake: Callable[[], object]) -> RunningTrial:  # noqa: ARG002 - it is polled
        """Ask Ray to place a trial."""
        mark = self._marks / f"{plan.number:04d}"
        mark.unlink(missing_ok=True)
        return RayTrial(plan, mark, _num_cpus(plan.spec), self._num_gpus(plan.spec))

    def _num_gpus(self, spec: TrainSpec) -> float:
        if self.gpus_per_trial is not None:
            return self.gpus_per_trial
        return float(_processes(spec)) if cluster_gpus() else 0.0

    def _check_room(self) -> None:
        """Raise SpecError if no node can ever run a trial: it would wait for ever."""
        num_cpus, num_gpus = _num_cpus(self.spec), self._num_gpus(self.spec)
        if not capacity(num_cpus, num_gpus):
            needs = plural(num_cpus, "CPU") + (f" and {num_gpus:g} GPUs" if num_gpus else "")
            raise SpecError(
                f"a trial needs {needs}, and no node of the Ray cluster has as much; a trial runs on one node. Use "
                "less -n, --threads or --gpus-per-trial."
            )


class RayTrial(RunningTrial):
    """A trial on a node of a Ray cluster."""

    def __init__(self, plan: TrialPlan, mark: Path, num_cpus: int, num_gpus: float) -> None:
        super().__init__(plan)
        self._mark = mark
        run_dir = str(plan.run_dir.absolute())  # a relative path would mean another folder on other nodes
        spec = dataclasses.replace(plan.spec, on="here", address="", run_dir=run_dir)
        self._task = RayTask(
            train_placed,
            (plan.number, plan.source, spec, str(mark), os.getcwd()),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_retries=spec.max_restarts,
        )

    def is_done(self) -> bool:
        """Return whether the task has ended."""
        return self._task.is_done()

    def result(self) -> dict[str, Any]:
        """Return the Result, or raise the error."""
        return dict(self._task.result())

    def stop(self) -> None:
        """Leave the mark that the task looks for."""
        self._mark.touch()

    def kill(self) -> None:
        """End the task's process, and with it the ranks."""
        self._task.kill()


def train_placed(number: int, source: TaskSource, spec: TrainSpec, mark: str, working_dir: str) -> dict[str, Any]:
    """Train a trial on the node where this runs, until it ends or its mark asks it to leave; return its Result."""
    marks = Path(mark).parent
    if not marks.is_dir():
        raise SpecError(
            f"{marks.parent} is not there on {socket.gethostname()}: the folder of a search must be on a disk that all "
            "nodes of the cluster share. Give a --run-dir on such a disk."
        )
    if Path(working_dir).is_dir():
        os.chdir(working_dir)
    ended = threading.Event()
    trial = LocalTrial(TrialPlan(number, source.load(), spec, source), ended.set)
    while not ended.wait(_POLL_S):
        if Path(mark).exists():
            trial.stop()
    while not trial.is_done():
        ended.wait(_POLL_S)
    return trial.result()


def _processes(spec: TrainSpec) -> int:
    return check_process_count(spec.processes, 1, 0)


def _num_cpus(spec: TrainSpec) -> int:
    return _processes(spec) * (spec.num_threads or 1)
