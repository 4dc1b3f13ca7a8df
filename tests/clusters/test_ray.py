"""Training on a real Ray cluster: what the local launcher promises holds there too."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from commands import TESTS, is_alive, pids_of, result_of, run, steps_in, wait_for
from instep.events.read import read_events
from ray_cluster import RayCluster, RayHome

TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = ("--steps", "60", "--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "--json")
ON_RAY = ("instep", "train", TASK, *OPTIONS, "--on", "ray", "-n", "2", "--address")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def right_bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return result_of(run("python", TASK, *OPTIONS, "pause_s=0", "--run-dir", str(run_dir), timeout_s=150))[
        "weights_sha256"
    ]


def train_until(cluster: RayCluster, run_dir: Path, num_steps: int) -> subprocess.Popen[str]:
    words = (*ON_RAY, "auto", "pause_s=0.05", "--save-every", "3", "--run-dir", str(run_dir))
    process = cluster.start(*words)
    wait_for(lambda: process.poll() is not None or len(steps_in(run_dir)) >= num_steps, timeout_s=200)
    assert process.poll() is None, process.communicate()
    return process


def end_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_killed_worker_is_replaced_and_a_stop_saves(ray_nodes: RayCluster, tmp_path: Path, right_bits: str) -> None:
    run_dir = tmp_path / "run"
    process = train_until(ray_nodes, run_dir, 8)
    os.kill(pids_of(run_dir, 2)[1], signal.SIGKILL)
    wait_for(lambda: process.poll() is not None or starts_in(run_dir) == [0, 1], timeout_s=100)
    reached = len(steps_in(run_dir))
    wait_for(lambda: process.poll() is not None or len(steps_in(run_dir)) >= reached + 2, timeout_s=60)
    process.send_signal(signal.SIGTERM)
    done = end_of(process)
    preempted = result_of(done)
    assert (preempted["status"], preempted["restarts"], preempted["world_size"]) == ("preempted", 1, 2)
    assert 8 <= preempted["steps"] < 60
    assert "restart 1 of 3 after " in done.stderr  # by what another rank noted, if Ray left it the time to
    (reason,) = [event["reason"] for event in read_events(run_dir) if event["event"] == "restart"]
    assert reason.startswith("restart 1 after ")
    assert {event["launcher"] for event in read_events(run_dir, 1) if event["event"] == "start"} == {"ray"}
    assert "[rank1] samples" in done.stderr  # what ranks print comes back, with --json to standard error
    assert not list(run_dir.glob(".ray-*"))
    elsewhere = result_of(run("python", TASK, *OPTIONS, "pause_s=0.05", "--run-dir", str(run_dir), timeout_s=150))
    assert (elsewhere["weights_sha256"], elsewhere["steps"], elsewhere["world_size"]) == (right_bits, 60, 1)


def starts_in(run_dir: Path) -> list[int]:
    """The attempts that rank 1 has begun."""
    return [event["attempt"] for event in read_events(run_dir, 1) if event["event"] == "start"]


@pytest.mark.slow
def test_interrupted_it_leaves_nothing_behind(ray_nodes: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = train_until(ray_nodes, run_dir, 2)
    pids = pids_of(run_dir, 2)
    process.send_signal(signal.SIGINT)
    done = end_of(process)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    wait_for(lambda: not any(map(is_alive, pids)))
    assert not list(run_dir.glob(".ray-*"))


def test_an_error_of_the_users_names_the_rank_in_a_ray_of_its_own(ray_alone: RayHome, tmp_path: Path) -> None:
    words = ("raise_at=5", "pause_s=0", "--max-restarts", "0", "--run-dir", str(tmp_path / "run"))
    done = ray_alone.run(*ON_RAY[:-1], *words, timeout_s=200)
    assert done.returncode == 1, done.stderr
    last = done.stderr[done.stderr.index("rank 1 failed first:") :]
    assert f'File "{TASK}"' in last
    assert "KeyError: 'sample 17'" in last
    assert "lost its peer" in last
    assert "KeyError" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    wait_for(lambda: not ray_alone.inside.pids())  # the Ray of this run has ended with it


@pytest.mark.slow
def test_a_run_directory_that_a_node_does_not_see(ray_nodes: RayCluster) -> None:
    run_dir = ray_nodes.hidden / "run"
    done = ray_nodes.run(*ON_RAY, "auto", "--run-dir", str(run_dir), timeout_s=200)
    assert done.returncode == 2, done.stderr
    assert f"{run_dir} is not there for rank " in done.stderr
    assert "disk that all nodes of the cluster share" in done.stderr
    assert "restart" not in done.stderr


def test_nobody_answers(tmp_path: Path) -> None:
    words = (*ON_RAY, "127.0.0.1:9", "--run-dir", str(tmp_path / "run"))
    done = run(*words, timeout_s=100)
    assert done.returncode == 3, done.stderr
    assert "nobody answers at 127.0.0.1:9" in done.stderr


def test_ray_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = run(*ON_RAY, "auto", "--run-dir", str(tmp_path / "run"), env={"PYTHONPATH": path}, timeout_s=100)
    assert done.returncode == 2, done.stderr
    assert "pip install 'instep[ray]'" in done.stderr
    assert not (tmp_path / "run").exists()
