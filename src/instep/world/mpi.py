"""The variables of OpenMPI and MPICH, and what they leave out.

[Note: Where rank 0 of an MPI job is]
No variable of either names the node of rank 0. OpenMPI's OMPI_MCA_orte_hnp_uri has the address of mpirun, which need
not be a node of the job; OMPI_COMM_WORLD_NODE_RANK counts processes of one node, not nodes. So: ranks that are all on
one node use 127.0.0.1; inside a SLURM allocation rank 0 is on its first node, where both put it by default; in all
other cases the user must name it. MPICH has no job number either: the port at which its proxies reach mpirun serves as
one.
"""

import os
import re
from collections.abc import Mapping

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
"""Rank, world size, local rank and local world size."""


def is_mpich(environ: Mapping[str, str]) -> bool:
    """Return whether MPICH's mpirun started this process; `srun --mpi=pmi2` sets PMI_RANK as well."""
    if "PMI_RANK" not in environ:
        return False
    return "MPI_LOCALRANKID" in environ or environ["PMI_RANK"] != environ.get("SLURM_PROCID")


def job_of(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Return a number that is equal for all processes of a job, and different for two jobs on one node."""
    if launcher == "mpich":
        return environ.get("PMI_JOBID") or hydra_port(os.getppid())
    job = environ.get("OMPI_MCA_ess_base_jobid", "")
    if job.isdigit():
        return str(int(job) >> 16)  # the lower half counts the jobs of one mpirun
    return environ.get("PMIX_NAMESPACE", "").split("@")[0]  # OpenMPI 5: prterun-host-4711@1


def master_address(nodelist_host: str, launcher: Launcher, world_size: int, local_world_size: int) -> str:
    """Return the host of rank 0 ([Note: Where rank 0 of an MPI job is]); refuse where it cannot be known."""
    if local_world_size == world_size:
        return "127.0.0.1"
    if nodelist_host:
        return nodelist_host
    option = "-x MASTER_ADDR=HOST" if launcher == "openmpi" else "-genv MASTER_ADDR HOST"
    raise SpecError(
        f"{local_world_size} of the {world_size} processes are on this node, and {launcher} does not say on which node "
        f"rank 0 is, where all must connect. Add {option} to mpirun, with the name of the first host of your host "
        "list; where mpirun itself runs there, that is $(hostname)."
    )


def hydra_port(pid: int) -> str:
    """Return the port at which the MPICH proxy above a process reaches its mpirun; empty: there is no such proxy."""
    import psutil

    try:
        process = psutil.Process(pid)
        for ancestor in (process, *process.parents()):
            words = ancestor.cmdline()
            if "--control-port" in words[:-1]:
                return re.sub(r".*\D", "", words[words.index("--control-port") + 1])
    except psutil.Error:  # it has ended, or is not ours to read
        pass
    return ""
