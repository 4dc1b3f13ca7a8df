"""Read from the environment which rank this process is.

Ranks: each for itself.

Launchers nest: srun may start torchrun, a SLURM allocation may contain mpirun. The innermost launcher started this
process, so the order of the candidates below is torchrun, OpenMPI, MPICH, SLURM. Contradictions are refused: a wrong
rank would show up as a hang an hour later.
"""

import os
import re
from collections.abc import Mapping

from instep.core.errors import SpecError
from instep.core.topology import Launcher, Place
from instep.world.mpi import NAMES, is_mpich, job_of, master_address
from instep.world.slurm import is_step

_NAMES: dict[Launcher, tuple[str, str, str, str]] = {
    **dict.fromkeys(("torchrun", "env"), ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    **NAMES,
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""Rank, world size, local rank and local world size."""


THREADS_FROM = "INSTEP_THREADS_FROM"
"""Set in the ranks of our own launcher: who has set OMP_NUM_THREADS, `instep` or the `user`."""


def detect(environ: Mapping[str, str]) -> Place:
    """Return this process's place from the variables that its launcher set; a world of one if there are none."""
    by_hand = "RANK" in environ and "WORLD_SIZE" in environ
    if by_hand and "TORCHELASTIC_RUN_ID" in environ:
        return _from_rank_variables(environ, "torchrun")
    if (launcher := _scheduler(environ)) is not None:
        if by_hand:
            _refuse_contradiction(environ, launcher)
        return _from_slurm(environ) if launcher == "slurm" else _from_mpi(environ, launcher)
    if by_hand:
        return _from_rank_variables(environ, "env")
    if "RANK" in environ:  # WORLD_SIZE alone is left behind by many shells and containers; RANK alone is a mistake
        raise SpecError(
            f"RANK={environ['RANK']} is set but WORLD_SIZE is not, so the number of processes is unknown. "
            "Set both (torchrun does), or unset RANK."
        )
    return Place()


def threads_asked(place: Place) -> int | None:
    """Return what OMP_NUM_THREADS asks for; None where the user has not set it."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not given.isdigit() or int(given) < 1:
        return None
    source = os.environ.get(THREADS_FROM)
    if source is None and place.launcher == "torchrun" and given == "1":  # torchrun sets it, unless the user has
        return None
    return None if source == "instep" else int(given)


def launcher_here() -> Launcher:
    """Return what started this process as a rank; contradictory variables count as none."""
    try:
        return detect(os.environ).launcher
    except SpecError:
        return "none"


def quiet_profiler() -> None:
    """Keep torch's profiler from printing a line whenever it starts and stops, unless the user wants to see them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def check_local_rank(given: int | None, environ: Mapping[str, str]) -> None:
    """Raise SpecError for a --local-rank, which torch.distributed.launch appends, that contradicts LOCAL_RANK."""
    if given is None:
        return
    actual = environ.get("LOCAL_RANK")
    if actual is None:
        raise SpecError(
            f"--local-rank={given} is what torch.distributed.launch appends to a script's arguments, and LOCAL_RANK, "
            "which it sets, too, is not set. Leave --local-rank out: the launcher decides about ranks."
        )
    if actual != str(given):
        raise SpecError(
            f"--local-rank={given} contradicts LOCAL_RANK={actual}: both describe this process. Leave "
            "--local-rank out, or unset LOCAL_RANK."
        )


def check_local_rank_here(given: int | None) -> None:
    """Check a --local-rank against this process's environment."""
    check_local_rank(given, os.environ)


def _scheduler(environ: Mapping[str, str]) -> Launcher | None:
    """Return the innermost scheduler whose variables are set."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        return "openmpi"
    if is_mpich(environ):
        return "mpich"
    return "slurm" if is_step(environ) else None


def _from_rank_variables(environ: Mapping[str, str], launcher: Launcher) -> Place:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size)
    node_rank = _number(environ, "GROUP_RANK", default=rank // max(1, local_world_size))
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    return _place(environ, launcher, local_world_size, node_rank, host, 29500, "TORCHELASTIC_RESTART_COUNT")


def _from_mpi(environ: Mapping[str, str], launcher: Launcher) -> Place:
    rank, world_size = (_number(environ, name) for name in NAMES[launcher][:2])
    local_world_size = max(1, _number(environ, NAMES[launcher][3], default=world_size))
    local_rank = _number(environ, NAMES[launcher][2], default=rank % local_world_size)
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    host = environ.get("MASTER_ADDR") or master_address(
        first_host(nodes) if nodes else "", launcher, world_size, local_world_size
    )
    # MPI does not number nodes; this is right where it fills one after the other, as it does by default.
    node_rank = max(0, rank - local_rank) // local_world_size
    return _place(environ, launcher, local_world_size, node_rank, host, port_of_job(job_of(environ, launcher)))


def _from_slurm(environ: Mapping[str, str]) -> Place:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or str(_number(environ, "SLURM_STEP_NUM_TASKS"))
    port = port_of_job(environ.get("SLURM_JOB_ID", "0"), int(environ["SLURM_STEP_ID"]))
    host = environ.get("MASTER_ADDR", first_host(nodes))
    return _place(environ, "slurm", _tasks_on_node(tasks, node_rank), node_rank, host, port, "SLURM_RESTART_COUNT")


def _place(
    environ: Mapping[str, str],
    launcher: Launcher,
    local_world_size: int,
    node_rank: int,
    master_addr: str,
    default_port: int,
    restarts: str = "",
) -> Place:
    """Return the place that a launcher's variables describe; raise SpecError where they contradict each other.

    `restarts` is the launcher's variable that counts restarts, if it has one.
    """
    names = _NAMES[launcher]
    shown = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    rank, world_size = (_number(environ, name) for name in names[:2])
    if world_size < 1 or local_world_size < 1:
        raise SpecError(f"{shown}: a world needs at least one process.")
    local_rank = _number(environ, names[2], default=rank % local_world_size)
    if rank >= world_size:
        raise SpecError(f"{shown}: a rank must be below the world size. Are variables of another launch left over?")
    if local_rank >= local_world_size or local_world_size > world_size:
        raise SpecError(f"{shown}: these contradict each other. Are variables of another launch left over?")
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        launcher=launcher,
        master_addr=master_addr,
        master_port=_number(environ, "MASTER_PORT", default=default_port),
        attempt=_number(environ, restarts, default=0),
    )


def port_of_job(job: str, step: int = 0) -> int:
    """Return a port that two jobs on one node do not share, nor two concurrent steps of a job."""
    digits = re.sub(r"\D", "", job) or "0"
    return 15000 + (int(digits[-9:]) + 7919 * step) % 15000


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


def _refuse_contradiction(environ: Mapping[str, str], launcher: Launcher) -> None:
    for ours, theirs in zip(_NAMES["env"][:2], _NAMES[launcher], strict=False):
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
