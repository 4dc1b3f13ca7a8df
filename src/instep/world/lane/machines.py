"""Which ranks share a machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MachinesPlan:
    """The ranks of a group by machine: within one in their order, the machines by their lowest rank."""

    machines: tuple[tuple[int, ...], ...]

    def where(self, rank: int) -> tuple[int, int]:
        """Give a rank's machine, and its place there."""
        for number, ranks in enumerate(self.machines):
            if rank in ranks:
                return number, ranks.index(rank)
        raise AssertionError(f"rank {rank} is on no machine")

    @property
    def num_rails(self) -> int:
        """How many ranks of each machine speak with the other machines, each for its share of a chunk."""
        return min(map(len, self.machines))

    @property
    def shares(self) -> bool:
        """Whether any machine has more than one rank: else there is nobody to share memory with."""
        return max(map(len, self.machines)) > 1


def plan_machines(labels: Sequence[str]) -> MachinesPlan:
    """Group ranks by the label of their machine, given in the order of the ranks."""
    by_label: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        by_label.setdefault(label, []).append(rank)
    return MachinesPlan(tuple(tuple(ranks) for ranks in by_label.values()))
