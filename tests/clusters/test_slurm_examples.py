"""The examples for SLURM, on a real one: both ways, two and four nodes, and the bits of one process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import patience
from commands import BIN, ROOT, result_of, run, steps_in, wait_for
from slurm_cluster import SlurmCluster
from slurm_runs import result

WORDS = ["--exact", "--shards", "8", "--steps", "12", "--quiet"]
TASK = str(ROOT / "examples" / "digits.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> str:
    folder = str(tmp_path_factory.mktemp("alone"))
    return result_of(run("python", TASK, *WORDS, "--json", "--run-dir", folder))["weights_sha256"]


def env_of(slurm: SlurmCluster, **more: str) -> dict[str, str]:
    """With the environment activated, as a person has it who submits."""
    return {**slurm.env, "PATH": f"{BIN}{os.pathsep}{slurm.env['PATH']}", **more}


def sbatch(slurm: SlurmCluster, run_dir: Path, *words: str) -> str:
    """Submit the batch script of one's own; sbatch's options come before it, the training's after."""
    at = next((number for number, word in enumerate(words) if word == "::"), len(words))
    log = run_dir.parent / "slurm-%j.out"
    command = ["sbatch", "--parsable", f"--output={log}", *words[:at], "examples/slurm/train.sbatch", *words[at + 1 :]]
    done = subprocess.run(command, env=env_of(slurm, RUN_DIR=str(run_dir)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("nodes", "tasks"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_a_script_of_ones_own(slurm: SlurmCluster, tmp_path: Path, alone: str, nodes: int, tasks: int) -> None:
    run_dir = tmp_path / "run"
    job = sbatch(slurm, run_dir, f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "::", *WORDS)
    state = slurm.wait(job, timeout_s=200)
    assert state == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
    actual = result(run_dir)
    assert (actual["world_size"], actual["weights_sha256"]) == (4, alone)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("nodes", "processes"), [(2, 2), (4, 1)])
@pytest.mark.slow  # test_slurm_submit.py submits, and compares the end
def test_submitted_by_instep(slurm: SlurmCluster, tmp_path: Path, alone: str, nodes: int, processes: int) -> None:
    run_dir = tmp_path / "a run"  # with a space
    words = ["--nodes", str(nodes), "-n", str(processes), *WORDS, "--run-dir", str(run_dir), "--follow", "--json"]
    done = patience.run(["bash", "examples/slurm/submit.sh", *words], timeout=200, env=env_of(slurm), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"job_id": told["job_id"], "run_dir": str(run_dir), "script": str(run_dir / "submit.sh")}
    assert slurm.state(told["job_id"]) == "COMPLETED"
    for part in (f"job {told['job_id']} is submitted", "4 processes on cpu", "the training is complete"):
        assert part in done.stderr
    actual = result(run_dir)
    assert (actual["world_size"], actual["weights_sha256"]) == (4, alone)


@pytest.mark.slow  # test_slurm_submit.py::test_warned_and_requeued has the warning and the requeueing
@pytest.mark.timeout(240)
def test_a_script_of_ones_own_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["--exact", "--shards", "8", "--steps", "400", "--batch-size", "16", "--eval-every", "never", "--quiet"]
    alone = result_of(run("python", TASK, *words, "--json", "--run-dir", str(tmp_path / "alone")))["weights_sha256"]
    run_dir = tmp_path / "run"
    job = sbatch(slurm, run_dir, "--nodes=2", "--ntasks-per-node=1", "::", *words)
    wait_for(lambda: len(steps_in(run_dir)) >= 3, timeout_s=90)
    slurm.run("scancel", "--signal=USR1", job)  # what SLURM does two minutes before the end
    slurm.wait(job, "PENDING", timeout_s=60)
    assert not (run_dir / "result.json").exists()
    slurm.wait(job, "COMPLETED", timeout_s=120, hurry=True)
    assert result(run_dir)["weights_sha256"] == alone
    assert slurm.job(job)["Restarts"] == "1"
