"""Read from the environment which rank this process is.

Ranks: each for itself.

Launchers nest: srun may start torchrun, a SLURM allocation may contain mpirun. The innermost launcher started this
process, so the order of the candidates below is torchrun, OpenMPI, MPICH, SLURM. Contradictions are refused: a wrong
rank would show up as a hang an hour later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from instep.core.errors import SpecError
from instep.core.topology import Launcher, Place
from instep.world.mpi import NAMES, is_mpich, job_of, master_address
from instep.world.slurm import is_step, port_of_step

_BY_HAND = ("RANK", "WORLD_SIZE")


def detect(environ: Mapping[str, str]) -> Place:
    """Return this process's place from the variables that its launcher set; a world of one if there are none."""
    by_hand = all(name in environ for name in _BY_HAND)
    if by_hand and "TORCHELASTIC_RUN_ID" in environ:
        return _from_rank_variables(environ, "torchrun")
    for launcher, rank, size in _candidates(environ):
        if by_hand:
            _refuse_contradiction(environ, launcher, rank, size)
        return _from_slurm(environ) if launcher == "slurm" else _from_mpi(environ, launcher)
    if by_hand:
        return _from_rank_variables(environ, "env")
    if "RANK" in environ:  # WORLD_SIZE alone is left behind by many shells and containers; RANK alone is a mistake
        raise SpecError(
            f"RANK={environ['RANK']} is set but WORLD_SIZE is not, so the number of processes is unknown. "
            "Set both (torchrun does), or unset RANK."
        )
    return Place()


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank; contradictory variables count as no."""
    try:
        return detect(os.environ).launched
    except SpecError:
        return False


def _candidates(environ: Mapping[str, str]) -> list[tuple[Launcher, str, str]]:
    """Return the schedulers whose variables are set, innermost first, with the names of rank and size."""
    candidates: list[tuple[Launcher, str, str]] = []
    if "OMPI_COMM_WORLD_RANK" in environ:
        candidates.append(("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    if is_mpich(environ):
        candidates.append(("mpich", "PMI_RANK", "PMI_SIZE"))
    if is_step(environ):
        candidates.append(("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return candidates


def _from_rank_variables(environ: Mapping[str, str], launcher: Launcher) -> Place:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    return _checked(
        environ,
        Place(
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK", default=rank % local_world_size),
            node_rank=_number(environ, "GROUP_RANK", default=rank // local_world_size),
            world_size=world_size,
            local_world_size=local_world_size,
            launcher=launcher,
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", default=29500),
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        ),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )


def _from_mpi(environ: Mapping[str, str], launcher: Launcher) -> Place:
    names = NAMES[launcher]
    rank, world_size = _number(environ, names[0]), _number(environ, names[1])
    local_world_size = max(1, _number(environ, names[3], default=world_size))
    local_rank = _number(environ, names[2], default=rank % local_world_size)
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    host = environ.get("MASTER_ADDR") or master_address(
        first_host(nodes) if nodes else "", launcher, world_size, local_world_size
    )
    return _checked(
        environ,
        Place(
            rank=rank,
            local_rank=local_rank,
            # MPI does not number nodes; this is right where it fills one after the other, as it does by default.
            node_rank=max(0, rank - local_rank) // local_world_size,
            world_size=world_size,
            local_world_size=local_world_size,
            launcher=launcher,
            master_addr=host,
            master_port=_number(environ, "MASTER_PORT", default=port_of_job(job_of(environ, launcher))),
        ),
        names,
    )


def _from_slurm(environ: Mapping[str, str]) -> Place:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    job = environ.get("SLURM_JOB_ID", "0")
    rank, world_size = _number(environ, names[0]), _number(environ, names[1])
    node = _number(environ, "SLURM_NODEID", default=0)
    local_world_size = _tasks_on_node(environ.get(names[3], str(world_size)), node)
    return _checked(
        environ,
        Place(
            rank=rank,
            local_rank=_number(environ, names[2], default=rank % local_world_size),
            node_rank=node,
            world_size=world_size,
            local_world_size=local_world_size,
            launcher="slurm",
            master_addr=environ.get("MASTER_ADDR", first_host(nodes)),
            master_port=_number(environ, "MASTER_PORT", default=port_of_step(job, environ["SLURM_STEP_ID"])),
            attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
        ),
        names,
    )


def port_of_job(job: str) -> int:
    """Return a port derived from a job's number, so that two jobs on one node do not share it."""
    digits = re.sub(r"\D", "", job) or "0"
    return 15000 + int(digits[-9:]) % 15000


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list: a03 of `a[03-07,9],b1`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if not match:
        raise SpecError(f"SLURM's node list {nodelist!r} cannot be read. Set MASTER_ADDR to the first node's name.")
    return match[1] + (match[2] or "") + (match[3] or "")


def _tasks_on_node(text: str, node: int) -> int:
    """Return a node's count from SLURM's `2(x3),1`: two tasks on each of three nodes, then one."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else counts[-1]


def _refuse_contradiction(environ: Mapping[str, str], launcher: str, rank: str, size: str) -> None:
    for ours, theirs in (("RANK", rank), ("WORLD_SIZE", size)):
        if theirs in environ and environ[ours] != environ[theirs]:
            raise SpecError(
                f"{ours}={environ[ours]} contradicts {theirs}={environ[theirs]} ({launcher}): "
                f"both describe this process. Unset {ours}, or set it to {theirs}."
            )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise SpecError(f"{name} is not set although the launcher's other variables are. Set it, or unset those.")
        return default
    if not text.strip().isdigit():
        raise SpecError(f"{name}={text!r} is not a number, so the rank of this process is unknown.")
    return int(text)


def _checked(environ: Mapping[str, str], place: Place, names: tuple[str, ...]) -> Place:
    shown = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    if place.world_size < 1 or place.local_world_size < 1:
        raise SpecError(f"{shown}: a world needs at least one process.")
    if place.rank >= place.world_size:
        raise SpecError(f"{shown}: a rank must be below the world size. Are variables of another launch left over?")
    if place.local_rank >= place.local_world_size or place.local_world_size > place.world_size:
        raise SpecError(f"{shown}: these contradict each other. Are variables of another launch left over?")
    return place
