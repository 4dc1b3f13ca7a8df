"""Who a process is, from its launcher's variables."""

from __future__ import annotations

import pytest

from instep.core.errors import SpecError
from instep.core.topology import Place
from instep.world.environment import detect, first_host, port_of_job

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_ID": "123456",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}


def test_nothing_is_a_world_of_one() -> None:
    assert detect({}) == Place()
    assert not detect({}).launched


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Place(
        rank=3,
        local_rank=1,
        node_rank=1,
        world_size=4,
        local_world_size=2,
        launcher="torchrun",
        master_addr="10.0.0.1",
        master_port=4000,
    )


def test_slurm() -> None:
    place = detect(SLURM)
    assert (place.rank, place.local_rank, place.node_rank, place.world_size) == (5, 1, 2, 7)
    assert place.local_world_size == 2
    assert place.master_addr == "gpu03"
    assert place.launcher == "slurm"


def test_a_batch_script_without_srun_is_a_world_of_one() -> None:
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) == Place()


def test_openmpi_and_mpich() -> None:
    assert detect(OPENMPI).launcher == "openmpi"
    assert (detect(OPENMPI).rank, detect(OPENMPI).world_size) == (1, 2)
    assert detect(MPICH).launcher == "mpich"
    assert (detect(MPICH).rank, detect(MPICH).world_size) == (1, 3)


# Captured under OpenMPI 4.1.4 on one machine; the node rank counts this machine's processes.
CAPTURED = {
    **OPENMPI,
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "315621377",
    "OMPI_MCA_orte_hnp_uri": "315621376.0;tcp://192.0.2.2:60377",
    "PMIX_NAMESPACE": "315621377",
}
TWO_HOSTS = {**CAPTURED, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


def test_mpi_on_one_machine_meets_at_its_loopback() -> None:
    place = detect(CAPTURED)
    assert (place.master_addr, place.node_rank, place.local_rank) == ("127.0.0.1", 0, 1)
    assert place.master_port == port_of_job(str(315621377 >> 16))
    another = detect({**CAPTURED, "OMPI_MCA_ess_base_jobid": str(315621377 + 2**16)})
    assert another.master_port != place.master_port


def test_mpi_on_several_machines() -> None:
    """No variable names rank 0's machine: the person does, or SLURM."""
    with pytest.raises(SpecError, match=r"-x MASTER_ADDR=HOST"):
        detect(TWO_HOSTS)
    with pytest.raises(SpecError, match=r"-genv MASTER_ADDR HOST"):
        detect({**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"})
    place = detect({**TWO_HOSTS, "MASTER_ADDR": "a"})
    assert (place.master_addr, place.node_rank, place.local_world_size) == ("a", 1, 1)
    assert detect({**TWO_HOSTS, "SLURM_JOB_NODELIST": "gpu[03-05]"}).master_addr == "gpu03"


def test_mpich_in_a_batch_script_is_no_step_of_srun() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    assert detect({**MPICH, **batch, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}).launcher == "mpich"
    by_srun = {"PMI_RANK": "5", "PMI_SIZE": "7"}  # srun --mpi=pmi2
    assert detect({**SLURM, **by_srun}).launcher == "slurm"


def test_the_innermost_launcher_wins() -> None:
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"
    assert detect({**SLURM, **OPENMPI}).launcher == "openmpi"


def test_variables_set_by_hand() -> None:
    place = detect({"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.launcher, place.rank, place.local_rank, place.local_world_size) == ("env", 1, 1, 2)
    by_hand = {**SLURM, "RANK": "5", "WORLD_SIZE": "7"}
    assert detect(by_hand).launcher == "slurm"


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "1"}, ("RANK=1 is set but WORLD_SIZE is not",)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2, WORLD_SIZE=2", "below the world size")),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ("RANK='one' is not a number",)),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "7"}, ("RANK=0 contradicts SLURM_PROCID=5",)),
        ({**OPENMPI, "RANK": "1", "WORLD_SIZE": "8"}, ("WORLD_SIZE=8 contradicts OMPI_COMM_WORLD_SIZE=2",)),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2", "contradict")),
        ({k: v for k, v in OPENMPI.items() if not k.endswith("WORLD_SIZE")}, ("OMPI_COMM_WORLD_SIZE is not set",)),
    ],
    ids=lambda value: "",
)
def test_contradictions_are_named(environ: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        detect(environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "host"), [("a", "a"), ("a,b", "a"), ("n[3-7]", "n3"), ("n[003,009]", "n003"), ("r[1-2]n", "r1n")]
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_two_jobs_do_not_share_a_port() -> None:
    ports = {port_of_job(str(job)) for job in range(1000, 2000)}
    assert len(ports) == 1000
    assert all(1024 < port < 32768 for port in ports)
