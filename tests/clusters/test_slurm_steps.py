"""Who a process is under a real SLURM: tasks of a step, batch scripts, shells of an allocation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import patience
from commands import BIN
from slurm_cluster import SlurmCluster
from slurm_runs import RECIPE, TASK

PRINT_PLACE = (
    "import dataclasses, json, os; from instep.world.environment import detect; "
    "print(json.dumps(dataclasses.asdict(detect(os.environ))))"
)


def places(slurm: SlurmCluster, *words: str) -> list[dict[str, object]]:
    out = slurm.srun(*words, sys.executable, "-c", PRINT_PLACE)
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda place: place["rank"])


@pytest.mark.timeout(120)
def test_two_tasks_on_each_of_two_nodes(slurm: SlurmCluster) -> None:
    actual = places(slurm, "--nodes=2", "--ntasks-per-node=2")
    assert [p["rank"] for p in actual] == [0, 1, 2, 3]
    assert [p["node_rank"] for p in actual] == [0, 0, 1, 1]
    assert [p["local_rank"] for p in actual] == [0, 1, 0, 1]
    assert {p["local_world_size"] for p in actual} == {2}
    assert {(p["launcher"], p["master_addr"]) for p in actual} == {("slurm", "node1")}
    assert len({p["master_port"] for p in actual}) == 1
    other = places(slurm, "--nodes=2", "--ntasks=3", "--nodelist=node[3-4]", "--distribution=block")
    assert [p["local_world_size"] for p in other] == [2, 2, 1]
    assert {p["master_addr"] for p in other} == {"node3"}
    assert {p["master_port"] for p in other}.isdisjoint(p["master_port"] for p in actual)


@pytest.mark.timeout(120)
def test_a_step_on_other_nodes_than_the_jobs_first(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    step = f"srun --nodes=2 --ntasks=2 --exact --nodelist=node[2-3] {sys.executable} -c '{PRINT_PLACE}'"
    script.write_text(f"#!/bin/bash\n{step} > one &\nsleep 0.3\n{step} > two\nwait\n")
    job = slurm.sbatch("--nodes=3", "--ntasks-per-node=2", f"--chdir={tmp_path}", str(script))
    assert slurm.wait(job, timeout_s=100) == "COMPLETED"
    actual = [[json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("one", "two")]
    assert {p["master_addr"] for step in actual for p in step} == {"node2"}
    assert len({p["master_port"] for step in actual for p in step}) == 2  # two steps side by side


@pytest.mark.timeout(120)
def test_a_forgotten_srun(slurm: SlurmCluster, tmp_path: Path) -> None:
    script, log = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(f'#!/bin/bash\n{sys.executable} {TASK} --run-dir {tmp_path}/run\necho "code $?"\n')
    job = slurm.sbatch("--nodes=2", "--ntasks=4", f"--output={log}", str(script))
    slurm.wait(job, timeout_s=100)
    told = log.read_text()
    assert "code 2" in told
    for part in (f"batch script of job {job}", "SLURM_NTASKS=4", "srun python train.py"):
        assert part in told
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(180)
def test_shells_of_an_allocation(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = [*RECIPE, "--steps", "2", "pause_s=0", "--json"]
    command = ["salloc", "--nodes=2", "--ntasks=2", sys.executable, TASK, *words, "--run-dir", str(tmp_path / "salloc")]
    done = patience.run(command, timeout=100, env=slurm.env)
    assert done.returncode == 0, done.stderr
    assert "is no task of that job" in done.stderr
    assert "srun before the command" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["world_size"] == 1
    # The shell of `srun --pty bash` is one task: it may launch as many processes as it likes.
    out = slurm.srun(
        *("-n1", "--cpus-per-task=2", str(BIN / "instep"), "train", TASK, *words, "-n", "2"),
        *("--run-dir", str(tmp_path / "pty")),
        timeout_s=100,
    )
    assert json.loads(out.splitlines()[-1])["world_size"] == 2
