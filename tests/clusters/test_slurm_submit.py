"""`instep submit slurm` on a real SLURM: whatever happens to the job, it ends with the bits of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import is_alive, result_of, run, start, steps_in, wait_for
from instep.core.errors import SpecError
from instep.events.read import read_events
from instep.launch.slurm import client
from slurm_cluster import SlurmCluster
from slurm_runs import RECIPE, TASK, instep, result, submit

STEPS = ["--steps", "40"]
QUICK = ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> str:
    """The weights that one process makes."""
    folder = str(tmp_path_factory.mktemp("alone"))
    words = ["python", TASK, *RECIPE, *STEPS, "pause_s=0", "--json", "--run-dir", folder]
    return result_of(run(*words))["weights_sha256"]


def reach(run_dir: Path, count: int, timeout_s: float = 100) -> None:
    """Wait until a run has made so many steps."""
    wait_for(lambda: len(steps_in(run_dir)) >= count, timeout_s=timeout_s)


def starts(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == "start"]


@pytest.mark.timeout(300)
def test_warned_and_requeued(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    """What SLURM sends before the time is up (tests/launch/test_slurm_script.py: when), sent by hand."""
    words = ["pause_s=0.1", "--nodes", "2", "--save-every", "never"]
    job = submit(slurm, tmp_path / "run", *STEPS, *words)
    reach(tmp_path / "run", 3)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, "PENDING", timeout_s=100)
    assert not (tmp_path / "run" / "result.json").exists()
    assert [e["status"] for e in read_events(tmp_path / "run") if e["event"] == "end"] == ["preempted"]
    slurm.wait(job, "COMPLETED", timeout_s=180, hurry=True)
    assert result(tmp_path / "run")["weights_sha256"] == alone
    assert slurm.job(job)["Restarts"] == "1"
    assert "The time is up: requeued" in (tmp_path / "run" / "logs" / f"slurm-{job}.out").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_time_limit(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    words = ["pause_s=0.5", "--nodes", "2", "--time", "30", "--signal-before", "110", "--save-every", "never"]
    job = submit(slurm, tmp_path / "run", *STEPS, *words)
    reach(tmp_path / "run", 3)
    # The end comes nearer: there are one to two minutes left, so SLURM sends its signal at its next look.
    minutes = int(slurm.job(job)["RunTime"].split(":")[1]) + 2
    slurm.run("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")
    slurm.wait(job, "PENDING", timeout_s=100)
    slurm.run("scontrol", "update", f"jobid={job}", "TimeLimit=30")
    assert not (tmp_path / "run" / "result.json").exists()
    assert [e["status"] for e in read_events(tmp_path / "run") if e["event"] == "end"] == ["preempted"]
    slurm.wait(job, "COMPLETED", timeout_s=180, hurry=True)
    assert result(tmp_path / "run")["weights_sha256"] == alone
    assert int(slurm.job(job)["Restarts"]) >= 1
    assert "The time is up: requeued" in (tmp_path / "run" / "logs" / f"slurm-{job}.out").read_text()


@pytest.mark.slow  # as test_warned_and_requeued, by another signal; faults/test_preemption.py has both
@pytest.mark.timeout(300)
def test_preempted_by_a_higher_partition(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    job = submit(slurm, tmp_path / "run", *STEPS, "pause_s=0.1", "--nodes", "2", "--save-every", "never")
    reach(tmp_path / "run", 3)
    other = slurm.sbatch("--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 2")
    assert slurm.wait(other, timeout_s=60) == "COMPLETED"
    ends = [event for event in read_events(tmp_path / "run") if event["event"] == "end"]
    assert [end["status"] for end in ends] == ["preempted"]  # saved by SIGTERM, not lost by SIGKILL
    slurm.wait(job, "COMPLETED", timeout_s=120, hurry=True)
    assert result(tmp_path / "run")["weights_sha256"] == alone
    assert slurm.job(job)["Restarts"] == "1"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_preempted_with_time_to_leave(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    """The ranks save and leave in their grace time, before SLURM would put the job back."""
    words = [*STEPS, "pause_s=0.2", "--partition", "patient", "--save-every", "never"]
    job = submit(slurm, tmp_path / "run", *words)
    once = submit(slurm, tmp_path / "once", *words, "--no-requeue")
    for name in ("run", "once"):
        reach(tmp_path / name, 3)
    other = slurm.sbatch("--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 2")
    assert slurm.wait(other, timeout_s=60) == "COMPLETED"
    assert slurm.wait(once) == "FAILED"
    assert slurm.job(once)["ExitCode"] == "3:0"
    assert "the training is not complete. Submit this script again" in slurm.output(once)
    assert slurm.job(job)["Restarts"] == "1"
    slurm.wait(job, "COMPLETED", timeout_s=120, hurry=True)
    assert result(tmp_path / "run")["weights_sha256"] == alone
    assert "The job was preempted: requeued, to continue from" in slurm.output(job)


def lose_a_node(slurm: SlurmCluster, tmp_path: Path, policy: str) -> str:
    words = ["pause_s=0.1", "--nodes", "2", "--save-every", "2", "--on-node-failure", policy, *QUICK]
    job = submit(slurm, tmp_path / "run", *STEPS, *words)
    reach(tmp_path / "run", 6)
    slurm.fail_node("node2")
    try:
        slurm.wait(job, "COMPLETED", timeout_s=200, hurry=True)
    finally:
        slurm.heal_node("node2")
    return job


@pytest.mark.timeout(300)
def test_a_node_fails_and_the_rest_goes_on(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    job = lose_a_node(slurm, tmp_path, "continue")
    actual = result(tmp_path / "run")
    assert (actual["world_size"], actual["weights_sha256"]) == (1, alone)
    assert slurm.job(job)["Restarts"] == "0"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_fails_and_the_job_is_requeued(slurm: SlurmCluster, tmp_path: Path, alone: str) -> None:
    job = lose_a_node(slurm, tmp_path, "requeue")
    actual = result(tmp_path / "run")
    assert (actual["world_size"], actual["weights_sha256"]) == (2, alone)
    assert slurm.job(job)["Restarts"] == "1"


@pytest.mark.slow  # launch/test_slurm_script.py runs an array's script through bash, cli/test_submit_slurm.py its words
@pytest.mark.timeout(300)
def test_an_array(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "runs", "--steps", "3", "pause_s=0", "--array", "seed=5,6", "--quiet")
    listed = json.loads(instep(slurm, "jobs", "--json").stdout)["jobs"]
    assert {row["job_id"] for row in listed} == {f"{job}_{index}" for index in range(2)}
    for index in range(2):
        slurm.wait(f"{job}_{index}", "COMPLETED", timeout_s=200)
    actual = [result(tmp_path / "runs" / str(index)) for index in range(2)]
    assert len({each["weights_sha256"] for each in actual}) == 2
    for index, seed in enumerate((5, 6)):
        spec = json.loads((tmp_path / "runs" / str(index) / "spec.json").read_text())
        assert spec["recipe"]["seed"] == seed
    listed = json.loads(instep(slurm, "jobs", "--all", "--json").stdout)["jobs"]
    ended = {row["run_dir"]: (row["state"], row["step"]) for row in listed if row["job_id"].startswith(f"{job}_")}
    assert ended == {str(tmp_path / "runs" / str(index)): ("completed", 3) for index in range(2)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_task_of_an_array_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "runs", *STEPS, "pause_s=0.4", "--array", "seed=5,6", "--quiet")
    for index in "01":
        reach(tmp_path / "runs" / index, 3)
    assert slurm.job(f"{job}_1")["JobId"] == job  # the last one has the number of them all
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_1")
    slurm.wait(f"{job}_1", "PENDING", timeout_s=60)
    assert slurm.state(f"{job}_0") == "RUNNING"
    for index in "10":
        slurm.wait(f"{job}_{index}", "COMPLETED", timeout_s=120, hurry=True)
    assert [slurm.job(f"{job}_{index}")["Restarts"] for index in "01"] == ["0", "1"]


@pytest.mark.timeout(300)
def test_follow_is_interrupted_and_the_job_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["submit", "slurm", TASK, *RECIPE, *STEPS, "pause_s=1", "--nodes", "2", "-n", "2"]
    follower = start("instep", *words, "--follow", "--run-dir", str(tmp_path / "run"), env=slurm.env)
    reach(tmp_path / "run", 2)
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=30)
    assert follower.returncode == 130, err
    (job,) = slurm.queue()
    assert f"Job {job} continues" in err
    assert slurm.state(job) == "RUNNING"
    (row,) = json.loads(instep(slurm, "jobs", "--json").stdout)["jobs"]
    assert (row["job_id"], row["state"], row["run_dir"]) == (job, "running", str(tmp_path / "run"))
    assert row["step"] >= 2
    processes = slurm.processes(job)
    assert len(processes) >= 6  # two launchers, two ranks on each
    done = instep(slurm, "cancel", job)
    assert done.returncode == 0, done.stderr
    assert f"job {job} is cancelled" in done.stderr
    assert slurm.queue() == []
    wait_for(lambda: not any(map(is_alive, processes)), timeout_s=5)
    assert slurm.processes(job) == []
    assert slurm.state(job) == "CANCELLED"


@pytest.mark.timeout(120)
def test_what_slurm_refuses(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    done = instep(slurm, "submit", "slurm", TASK, "--run-dir", str(run_dir), "--", "--partition", "nope")
    assert done.returncode == 2
    assert "invalid partition specified: nope" in done.stderr  # SLURM's own words
    assert not run_dir.exists()
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --no-such-option\n")
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    with pytest.raises(SpecError, match="unrecognized option"):
        client.submit(tmp_path / "job.sh")
    done = instep(slurm, "cancel", "999999")
    assert done.returncode == 2
    assert "Invalid job id" in done.stderr
    assert slurm.queue() == []


@pytest.mark.timeout(120)
def test_a_job_whose_training_fails(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["submit", "slurm", TASK, *RECIPE, "--steps", "9", "raise_at=3", "raise_on_rank=0", "pause_s=0"]
    done = instep(slurm, *words, "--max-restarts", "0", "-n", "2", "--follow", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'sample 17'" in done.stderr
    assert "is failed, and the training is not complete" in done.stderr


@pytest.mark.timeout(60)
def test_without_slurm(tmp_path: Path) -> None:
    done = run("instep", "submit", "slurm", TASK, "--run-dir", str(tmp_path / "run"), env={"PATH": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    assert "sbatch is not on the PATH" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "run").exists()
