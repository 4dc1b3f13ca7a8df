"""One table: the same file under every launcher ends with the same bits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import BIN, ROOT, result_of, run, start, wait_for
from instep.events.read import read_events
from mpi_programs import MPI, mpirun
from ranks import free_port
from ray_cluster import RayHome
from slurm_cluster import SlurmCluster

DIGITS = str(ROOT / "examples" / "digits.py")
PYTHON = str(BIN / "python")
OPTIONS = ("--exact", "--epochs", "2", "--json")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process ends with."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    return result_of(run("python", DIGITS, *OPTIONS, "--run-dir", str(run_dir), timeout_s=150))


def check(right: dict[str, Any], actual: dict[str, Any], run_dir: Path, launcher: str) -> None:
    same = ("weights_sha256", "steps", "epochs", "loss", "metrics", "status", "restarts")
    assert {name: actual[name] for name in same} == {name: right[name] for name in same}
    assert actual["world_size"] == 2
    assert actual["run_dir"] == str(run_dir)
    assert json.loads((run_dir / "result.json").read_text())["weights_sha256"] == right["weights_sha256"]
    starts = [next(iter(read_events(run_dir, rank))) for rank in range(2)]
    assert [(event["rank"], event["launcher"]) for event in starts] == [(0, launcher), (1, launcher)]


def test_instep_train(right: dict[str, Any], tmp_path: Path) -> None:
    done = run("instep", "train", DIGITS, "-n", "2", *OPTIONS, "--run-dir", str(tmp_path), timeout_s=150)
    check(right, result_of(done), tmp_path, "torchrun")  # elastic, by its variables


def test_torchrun(right: dict[str, Any], tmp_path: Path) -> None:
    words = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), DIGITS)
    check(right, result_of(run(*words, *OPTIONS, "--run-dir", str(tmp_path), timeout_s=150)), tmp_path, "torchrun")


@pytest.mark.parametrize("kinds", [tuple(MPI), *(pytest.param((k, k), marks=pytest.mark.slow) for k in MPI)])
def test_mpirun(right: dict[str, Any], tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Two jobs at once: each finds a port of its own."""
    runs = [tmp_path / name for name in "ab"]
    starts = zip(kinds, runs, strict=True)
    jobs = [start(*mpirun(kind), PYTHON, DIGITS, *OPTIONS, "--run-dir", str(run_dir)) for kind, run_dir in starts]
    for job, kind, run_dir in zip(jobs, kinds, runs, strict=True):
        out, err = job.communicate(timeout=150)
        result = result_of(subprocess.CompletedProcess(job.args, job.returncode, out, err))
        check(right, result, run_dir, kind)


def test_srun(right: dict[str, Any], tmp_path: Path, slurm: SlurmCluster) -> None:
    out = slurm.srun("-n", "2", PYTHON, DIGITS, *OPTIONS, "--run-dir", str(tmp_path), timeout_s=150, cwd=ROOT)
    check(right, json.loads(out.strip().splitlines()[-1]), tmp_path, "slurm")


@pytest.mark.slow  # test_ray.py compares the bits, and starts a Ray that ends with the run
def test_ray(right: dict[str, Any], tmp_path: Path, ray_alone: RayHome) -> None:
    words = ("instep", "train", DIGITS, "--on", "ray", "-n", "2", *OPTIONS, "--run-dir", str(tmp_path))
    done = ray_alone.run(*words, timeout_s=250)
    check(right, result_of(done), tmp_path, "ray")
    wait_for(lambda: not ray_alone.inside.pids())  # the Ray of this run has ended with it
