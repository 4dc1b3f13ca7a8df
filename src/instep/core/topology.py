"""Which process of a job this is, as plain values."""

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["none", "torchrun", "slurm", "openmpi", "mpich", "ray", "env"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process of a job. Everything that may differ between ranks follows from this."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: Launcher = "none"
    """What started the processes; "env": RANK and WORLD_SIZE were set by hand."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"
    attempt: int = 0
    """How often the launcher has restarted the job."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process as a rank."""
        return self.launcher != "none"

    @property
    def spans_nodes(self) -> bool:
        """Whether the world has ranks on several nodes."""
        return self.local_world_size < self.world_size
