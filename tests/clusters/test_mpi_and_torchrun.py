"""Under mpirun and torchrun: signals, a failing rank, restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import BIN, TESTS, result_of, run, start, steps_in, wait_for
from instep.events.read import read_events
from mpi_programs import mpirun
from ranks import free_port

PYTHON = str(BIN / "python")
SLOW = str(TESTS / "faults" / "slow_task.py")
RECIPE = ("--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "--json")

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_mpirun_passes_a_warning_on(tmp_path: Path, kind: str) -> None:
    """SIGUSR1 to mpirun: the ranks save and leave, and the same command goes on, under torchrun."""
    command = (SLOW, "--steps", "30", *RECIPE, "pause_s=0.03", "--run-dir", str(tmp_path))
    job = start(*mpirun(kind), PYTHON, *command)
    wait_for(lambda: job.poll() is not None or len(steps_in(tmp_path)) >= 4, timeout_s=150)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=100)
    preempted = result_of(subprocess.CompletedProcess(job.args, job.returncode, json_line(out), err))
    assert preempted["status"] == "preempted"
    assert 4 <= preempted["steps"] < 30
    done = run("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), *command, timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert json.loads(json_line(done.stdout))["steps"] == 30


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_a_failing_rank_ends_an_mpi_job(tmp_path: Path, kind: str) -> None:
    command = (SLOW, "--steps", "30", *RECIPE, "raise_at=3", "--run-dir", str(tmp_path))
    done = run(*mpirun(kind), PYTHON, *command, timeout_s=150)
    assert done.returncode in (1, 3)  # MPICH adds the ranks' codes up, bit by bit
    assert "KeyError: 'sample 17'" in done.stderr


def test_torchrun_restarts_from_the_checkpoint(tmp_path: Path) -> None:
    """A killed rank, two agents: elastic restarts both, and the run ends with the bits of an undisturbed one."""
    command = (SLOW, "--steps", "40", *RECIPE, "--save-every", "2")
    whole = run("python", *command, "pause_s=0", "--run-dir", str(tmp_path / "whole"), timeout_s=150)
    right = json.loads(json_line(whole.stdout))["weights_sha256"]
    run_dir = tmp_path / "run"
    agent = ("torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2")
    meet = ("--rdzv-backend", "c10d", "--rdzv-id", "one", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    more = {"env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
    words = (*agent, *meet, "--local-addr", "127.0.0.1", *command, "pause_s=0.05", "--run-dir", str(run_dir))
    agents = [start(*words, **more) for _ in range(2)]
    wait_for(lambda: len(steps_in(run_dir)) >= 6 or any(a.poll() is not None for a in agents), timeout_s=150)
    (pid,) = {event["pid"] for event in starts_of(run_dir, 1)}
    os.kill(pid, signal.SIGKILL)
    told = [each.communicate(timeout=150) for each in agents]
    assert [each.returncode for each in agents] == [0, 0], told
    assert json.loads((run_dir / "result.json").read_text())["weights_sha256"] == right
    assert [event["attempt"] for event in starts_of(run_dir, 1)] == [0, 1]


def starts_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir, rank) if event["event"] == "start"]


def json_line(text: str) -> str:
    """Find the Result among what the ranks of a Task print themselves."""
    return next(line for line in text.splitlines() if line.startswith('{"steps"'))
