"""Where a process stands among the others, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["none", "torchrun", "slurm", "openmpi", "mpich", "ray", "env"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is. Everything that may differ by rank derives from here."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: Launcher = "none"
    """Who started the processes; "env" means RANK and WORLD_SIZE set by hand."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"
    attempt: int = 0
    """How often the launcher has restarted this world."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process as one of its world."""
        return self.launcher != "none"
