"""SLURM's variables, and which combinations of them are mistakes. Pure.

A process may see SLURM's variables in four ways: as a task of a step (srun started it), in a batch script, in the
shell that salloc opened, or left over in a shell whose allocation has ended. Only the tasks of a step form a world.
"""

from collections.abc import Mapping

from instep.core.errors import SpecError
from instep.core.topology import Place

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Numbers from here on are not steps of srun, but the batch script, the shell of salloc and the like."""


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; a batch script has SLURM_PROCID=0 as well."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def gpus_of_node(environ: Mapping[str, str], visible: int) -> int:
    """Return how many GPUs the tasks of this node have together; where SLURM binds them, a task sees only its own."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(visible, int(count)) if visible == 1 and count.isdigit() else visible


def judge_allocation(
    environ: Mapping[str, str], place: Place, processes: int, nodes: int, gpus: int
) -> tuple[str, ...]:
    """Return notices about how SLURM started this process; refuse what is certainly a mistake.

    `processes` and `nodes` are what this process will launch itself, 1 and 1 if nothing; `gpus` is what it sees.
    """
    if "SLURM_JOB_ID" not in environ:
        return ()
    if place.launcher == "slurm":
        return _judge_gpus(place, processes, nodes, gpus_of_node(environ, gpus))
    if place.launched:  # by torchrun or mpirun inside the allocation
        return ()
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ:
        return _judge_batch_script(environ, processes, nodes)
    return _judge_shell(environ, processes, nodes)


def _judge_gpus(place: Place, processes: int, nodes: int, gpus: int) -> tuple[str, ...]:
    tasks = place.local_world_size
    if processes > 1 or nodes > 1 or not gpus or tasks == gpus:
        return ()
    if tasks > gpus:
        return (
            f"{tasks} tasks of this node share {gpus} GPUs, which is slower than {gpus} tasks would be. Use "
            f"--ntasks-per-node={gpus} with srun or sbatch.",
        )
    idle = f"{gpus - tasks} of the {gpus} GPUs of this node stay idle"
    return (f"{idle}: SLURM started {tasks} tasks here, and a task trains on one GPU. Use --ntasks-per-node={gpus}.",)


def _judge_batch_script(environ: Mapping[str, str], processes: int, nodes: int) -> tuple[str, ...]:
    tasks, hosts = _count(environ, "SLURM_NTASKS"), _count(environ, "SLURM_NNODES")
    if nodes > 1:
        return ()
    if tasks > 1 and processes == 1:
        raise SpecError(
            f"This is a batch script of job {environ['SLURM_JOB_ID']} with SLURM_NTASKS={tasks}, but only one process "
            "was started, so the others would wait for nothing. Put srun before the command (srun python train.py), "
            "or ask sbatch for --ntasks=1."
        )
    if hosts > 1:
        return (
            f"job {environ['SLURM_JOB_ID']} has {hosts} nodes, and all {processes} processes train on this one. Put "
            "srun before the command, or use instep submit slurm.",
        )
    return ()


def _judge_shell(environ: Mapping[str, str], processes: int, nodes: int) -> tuple[str, ...]:
    tasks = _count(environ, "SLURM_NTASKS")
    if ("SLURM_STEP_ID" in environ and tasks <= 1) or processes > 1 or nodes > 1:
        return ()
    return (
        f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} is set, but this process is no task of that job: the shell is "
        "salloc's, or the variables are left over. It trains alone, where it is. With srun before the command it would "
        f"use the job's {tasks} task{'s' * (tasks != 1)}.",
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 1
