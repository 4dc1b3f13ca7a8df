"""Which combinations of SLURM's variables are a world, a mistake or a leftover."""

from __future__ import annotations

import pytest

from instep.core.errors import SpecError
from instep.core.topology import Place
from instep.world.environment import detect, port_of_job
from instep.world.slurm import gpus_of_node, is_step, judge_allocation

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
}
BATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SALLOC = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
INTERACTIVE_STEP = {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def judge(environ: dict[str, str], processes: int = 1, nodes: int = 1, gpus: int = 0) -> str:
    return " ".join(judge_allocation(environ, detect(environ), processes, nodes, gpus))


def test_only_a_step_is_a_world() -> None:
    assert is_step(STEP)
    assert not any(map(is_step, (BATCH, SALLOC, INTERACTIVE_STEP, {})))
    assert detect(INTERACTIVE_STEP) == detect(BATCH) == detect(SALLOC) == Place()
    assert detect({**STEP, "SLURM_STEP_NODELIST": "gpu4", "SLURM_JOB_NODELIST": "gpu[3-4]"}).master_addr == "gpu4"


def test_a_forgotten_srun_is_refused() -> None:
    with pytest.raises(SpecError, match=r"job 12 with SLURM_NTASKS=8.*srun python"):
        judge(BATCH)
    assert "all 4 processes train on this one" in judge(BATCH, processes=4)
    assert judge(BATCH, processes=4, nodes=2) == ""  # launchers on several nodes by hand
    assert judge({**BATCH, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}) == ""


def test_shells() -> None:
    assert "SLURM_JOB_ID=12 is set, but this process is no task" in judge(SALLOC)
    assert "use the job's 8 tasks" in judge(INTERACTIVE_STEP)
    assert judge({**INTERACTIVE_STEP, "SLURM_NTASKS": "1"}) == ""
    assert judge(SALLOC, processes=4) == ""
    assert judge({}) == ""


def test_tasks_against_gpus() -> None:
    assert judge(STEP, gpus=4) == judge(STEP, gpus=0) == ""
    assert "4 tasks of this node share 2 GPUs" in judge(STEP, gpus=2)
    assert "4 of the 8 GPUs of this node stay idle" in judge(STEP, gpus=8)
    assert "--ntasks-per-node=8" in judge(STEP, gpus=8)
    bound = {**STEP, "SLURM_GPUS_ON_NODE": "4"}  # each task sees its own only
    assert gpus_of_node(bound, 1) == 4
    assert gpus_of_node(bound, 2) == 2
    assert judge(bound, gpus=1) == ""


def test_torchrun_inside_a_batch_script_is_torchruns() -> None:
    torchrun = {**BATCH, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert judge(torchrun) == ""


def test_ports() -> None:
    assert len({port_of_job(str(job)) for job in range(40000, 41000)}) == 1000
    assert len({port_of_job("77", step) for step in range(100)}) == 100
    near = {port_of_job(str(job), step) for job in range(500, 600) for step in range(2)}
    assert len(near) == 200
    assert all(15000 <= port < 30000 for port in near)
