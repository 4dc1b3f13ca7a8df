"""A search as an array of jobs on a real SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import TESTS, steps_in, wait_for
from instep.events.read import read_events
from slurm_cluster import SlurmCluster
from slurm_runs import instep

TASK = f"{TESTS / 'tune' / 'tunable.py'}:Paced"
WORDS = ("lr=0.01..0.1", "--trials", "4", "--metric", "accuracy:max", "--steps", "60", "--save-every", "5")


def running_in(folder: Path) -> list[Path]:
    """Return the trials that are in the middle of their training."""
    trials = [path for path in folder.glob("trials/*") if not (path / "result.json").exists()]
    return [trial for trial in trials if len(steps_in(trial)) >= 5]


def attempts_in(trial: Path) -> int:
    return sum(event["event"] == "start" for event in read_events(trial))


@pytest.mark.slow  # tune/test_shared.py shares a search without SLURM; launch/test_slurm_script.py runs a job's script
@pytest.mark.timeout(600)
def test_an_array_searches_and_a_job_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """No trial runs twice, and the one of a job that was asked to leave is continued."""
    folder = tmp_path / "s"
    how = ("--array", "2", "--threads", "1", "--run-dir", str(folder), "--json")
    done = instep(slurm, "submit", "slurm", "--tune", TASK, *WORDS, *how)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout.splitlines()[-1])["job_id"]
    wait_for(lambda: len(running_in(folder)) == 2, timeout_s=100)
    rows = json.loads(instep(slurm, "jobs", "--json").stdout)["jobs"]
    assert {row["job_id"] for row in rows} == {f"{job}_0", f"{job}_1"}
    assert {(row["run_dir"], row["trials"], row["state"]) for row in rows} == {(str(folder), 2, "running")}
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_1")
    slurm.wait(f"{job}_1", "PENDING", timeout_s=60)
    for index in "10":
        slurm.wait(f"{job}_{index}", "COMPLETED", timeout_s=200, hurry=True)
    assert "The time is up: requeued, to continue from" in slurm.output(f"{job}_1")
    outcomes = [json.loads(path.read_text().splitlines()[-1]) for path in folder.glob("logs/outcome-*.json")]
    assert "complete" in [outcome["status"] for outcome in outcomes]
    whole = next(outcome for outcome in outcomes if outcome["status"] == "complete")
    assert [trial["state"] for trial in whole["trials"]] == ["complete"] * 4
    assert sorted(attempts_in(path) for path in folder.glob("trials/*")) == [1, 1, 1, 2]
    assert (folder / "report.html").exists()
