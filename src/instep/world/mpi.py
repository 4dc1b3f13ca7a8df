"""What OpenMPI's and MPICH's variables mean, and what they leave out.

[Note: Where rank 0 of an MPI job is]
No variable of either names the machine that rank 0 is on. OpenMPI's OMPI_MCA_orte_hnp_uri has the address of mpirun,
which need not be a machine of the job; OMPI_COMM_WORLD_NODE_RANK counts processes of one machine, not machines. So:
all ranks on one machine meet at 127.0.0.1; inside a SLURM allocation rank 0 is on its first node, where both put it
unless told otherwise; and in all other cases the person must say it. MPICH has no number for a job, either: the port
that its proxies call home at serves as one.

Room: reads /proc for the proxy's port; all else is pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from instep.core.errors import SpecError
from instep.core.topology import Launcher

NAMES: dict[Launcher, tuple[str, str, str, str]] = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Rank, size, and both among the processes of this machine."""
_MOST_ANCESTORS = 16


def is_mpich(environ: Mapping[str, str]) -> bool:
    """Tell whether MPICH's mpirun started this process; `srun --mpi=pmi2` sets PMI_RANK too, and knows the nodes."""
    if "PMI_RANK" not in environ:
        return False
    return "MPI_LOCALRANKID" in environ or environ["PMI_RANK"] != environ.get("SLURM_PROCID")


def job_of(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Give a number that the processes of a job share, and two jobs on one machine do not."""
    if launcher == "mpich":
        return environ.get("PMI_JOBID") or hydra_port(os.getppid())
    job = environ.get("OMPI_MCA_ess_base_jobid", "")
    if job.isdigit():
        return str(int(job) >> 16)  # the lower half counts what one mpirun has started
    return environ.get("PMIX_NAMESPACE", "").split("@")[0]  # OpenMPI 5: prterun-host-4711@1


def master_address(nodelist_host: str, launcher: Launcher, world_size: int, local_world_size: int) -> str:
    """Say where rank 0 is, [Note: Where rank 0 of an MPI job is]; refuse where that cannot be known."""
    if local_world_size == world_size:
        return "127.0.0.1"
    if nodelist_host:
        return nodelist_host
    option = "-x MASTER_ADDR=HOST" if launcher == "openmpi" else "-genv MASTER_ADDR HOST"
    raise SpecError(
        f"{local_world_size} of the {world_size} processes are on this machine, and {launcher} does not say on which "
        f"machine rank 0 is, where all must meet. Add {option} to mpirun, with the name of the first host of your host "
        "list; where mpirun itself runs there, that is $(hostname)."
    )


def hydra_port(pid: int) -> str:
    """Find the port that MPICH's proxy above a process calls its mpirun at; empty: there is no such proxy."""
    for _ in range(_MOST_ANCESTORS):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:  # gone, or not this kind of system
            return ""
        if "--control-port" in words[:-1]:
            return re.sub(r".*\D", "", words[words.index("--control-port") + 1])
        pid = int(parent)
    return ""
