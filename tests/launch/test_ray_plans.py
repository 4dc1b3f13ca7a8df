"""What is decided about ranks under Ray: without a Ray."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from instep.core.errors import EXIT_ENVIRONMENT, EXIT_SPEC, FailureRecord, SpecError
from instep.core.spec import TrainSpec
from instep.events.schema import StepRecord
from instep.events.write import EventLog
from instep.launch.launcher import find_launcher
from instep.launch.logs import LogPlan
from instep.launch.ray import plan_workers
from instep.launch.ray_rank import Meeting, RayJob, _is_given_up
from instep.launch.ray_tasks import fitting
from instep.launch.scratch import Scratch


def test_workers_get_what_the_cluster_has() -> None:
    cores, gpus = {"CPU": 8.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0}
    here = plan_workers(cores, TrainSpec(on="ray", processes=4))
    assert (here.num_workers, here.use_gpu, here.notice) == (4, False, "Ray places 4 workers, one CPU each")
    assert plan_workers(cores, TrainSpec(on="ray", processes="auto")).num_workers == 8
    assert plan_workers(gpus, TrainSpec(on="ray", processes="auto")).num_workers == 2
    more = plan_workers(gpus, TrainSpec(on="ray", processes=3))
    assert more.use_gpu
    assert "its cluster has 2 now" in more.notice
    with pytest.raises(SpecError, match="torch sees no GPU"):
        plan_workers(cores, TrainSpec(on="ray", processes="gpu"))


def test_tasks_are_counted_node_by_node() -> None:
    node = {"CPU": 4.0, "GPU": 1.0}
    assert fitting(node, 1, 0) == 4
    assert fitting(node, 3, 0) == 1
    assert fitting(node, 1, 0.5) == 2
    assert fitting(node, 1, 0.3) == 3
    assert fitting(node, 1, 2) == fitting({"CPU": 4.0}, 1, 0.1) == fitting({}, 1, 0) == 0


def job_in(folder: Path, max_restarts: int = 3) -> RayJob:
    scratch = Scratch(folder / "scratch")
    for attempt in range(2):
        (scratch.folder / f"attempt-{attempt}").mkdir(parents=True)
    return RayJob(print, (), scratch, folder, LogPlan(folder / "logs"), str(folder), max_restarts)


def meeting(attempt: int, reached: int = 0) -> Meeting:
    return Meeting(attempt=attempt, world_size=2, reached=reached, address="", port=0, given_up=False)


ERROR = FailureRecord(rank=1, time_ns=5, summary="KeyError: 'x'", traceback="T")
LOST = FailureRecord(rank=0, time_ns=6, summary="lost", exit_code=EXIT_ENVIRONMENT, consequence=True)
WRONG = FailureRecord(rank=1, time_ns=5, summary="no", exit_code=EXIT_SPEC, final=True)


def test_an_error_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert _is_given_up(job, meeting(0, reached=-1), ERROR)
    noted = job.scratch.load_failure(0, 1)
    assert noted is not None
    assert "no step has succeeded yet" in noted.summary


def make_a_step(run_dir: Path) -> None:
    with contextlib.closing(EventLog(run_dir, 0)) as log:
        log.step(StepRecord(step=1, epoch=0, loss=1.0, lr=0.1, num_samples=1))


def test_an_error_is_tried_again_once(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    make_a_step(tmp_path)
    assert not _is_given_up(job, meeting(0), ERROR)
    assert not _is_given_up(job, meeting(0), LOST)
    assert _is_given_up(job, meeting(1), ERROR)
    assert _is_given_up(job, meeting(1), LOST)  # what it noticed is of that error's making
    noted = job.scratch.load_failure(1, 1)
    assert noted is not None
    assert "failed the same way twice" in noted.summary


def test_an_error_after_progress_is_another_one(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    make_a_step(tmp_path)
    assert not _is_given_up(job, meeting(0), ERROR)
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert not _is_given_up(job, meeting(1, reached=3), ERROR)
    assert _is_given_up(job, meeting(1, reached=7), ERROR)


def test_a_wrong_spec_is_not_tried_again(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert _is_given_up(job, meeting(0), WRONG)
    assert job.scratch.is_marked("given-up")


def test_without_restarts_ray_itself_ends_it(tmp_path: Path) -> None:
    job = job_in(tmp_path, max_restarts=0)
    assert not _is_given_up(job, meeting(0), WRONG)
    assert not job.scratch.is_marked("given-up")


def test_an_unknown_launcher_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"on='slurm' is unknown\. Choose one of here, ray\."):
        find_launcher(TrainSpec(on="slurm"))
