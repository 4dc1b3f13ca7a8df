"""The ranks on their mesh, with a process group for each axis.

Ranks: all; groups are made on all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from instep.core.mesh import AXES, Mesh
from instep.world.world import World


@dataclass(frozen=True)
class Grid:
    """All ranks, and those with which this one shares batches."""

    mesh: Mesh
    world: World
    """All ranks."""
    data: World
    """The ranks that hold the same part of the model (or shards of it), each with its share of a batch."""
    devices: DeviceMesh | None = None
    """The mesh, as PyTorch wants it; None where every rank holds the whole model."""

    @classmethod
    def open(cls, world: World, mesh: Mesh) -> Grid:
        """Make the groups that a mesh needs. Called on all ranks."""
        if mesh.has_whole_models:
            return cls(mesh, world, world)
        devices = init_device_mesh(world.device.type, mesh.shape, mesh_dim_names=AXES)
        data = devices["dp", "fsdp"]._flatten("data")
        return cls(mesh, world, world.within(data.get_group()), devices)

    def among(self, stages: Sequence[int]) -> World | None:
        """Make a world of ranks of this rank's pipeline, by their stages; None if it is none. Called on all ranks."""
        found: World | None = None
        for first in range(self.mesh.size):
            if self.mesh.coordinate(first, "pp") == 0:
                along = self.mesh.ranks_along(("pp",), first)
                ranks = [along[stage] for stage in stages]
                group = dist.new_group(ranks)  # made by all, also by who is not in it
                if self.world.rank in ranks:
                    found = self.world.within(group)
        return found

    def __deepcopy__(self, _memo: object) -> Grid:
        return self  # there is one, whoever copies a module that knows it

    @property
    def is_counted(self) -> bool:
        """Whether what this rank counts of its rows is taken."""
        return self.mesh.is_counted(self.world.rank)
