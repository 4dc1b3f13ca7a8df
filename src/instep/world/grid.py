"""The ranks on their mesh, with a process group for each axis.

Ranks: all; all ranks create the groups, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from instep.core.mesh import AXES, DATA_AXES, Mesh
from instep.world.world import World


@dataclass(frozen=True)
class Grid:
    """All ranks, and those that this rank shares batches with."""

    mesh: Mesh
    world: World
    """All ranks."""
    data: World
    """The ranks with the same part of the model (or shards of it), each with its part of the batch."""
    devices: DeviceMesh | None = None
    """torch's device mesh; None where every rank holds the whole model."""

    @classmethod
    def open(cls, world: World, mesh: Mesh) -> Grid:
        """Create the groups that a mesh needs. Called on all ranks."""
        if mesh.has_whole_models:
            return cls(mesh, world, world)
        devices = init_device_mesh(world.device.type, mesh.shape, mesh_dim_names=AXES)
        data = devices[DATA_AXES]._flatten("data")
        return cls(mesh, world, world.within(data.get_group()), devices)

    def among(self, stages: Sequence[int]) -> World | None:
        """Return a world of some stages of this rank's pipeline; None if it is not in it. Called on all ranks."""
        own: World | None = None
        for first in range(self.mesh.size):
            if self.mesh.coordinate(first, "pp") == 0:
                along = self.mesh.ranks_along(("pp",), first)
                ranks = [along[stage] for stage in stages]
                group = dist.new_group(ranks)  # every rank must call it, also those outside the group
                if self.world.rank in ranks:
                    own = self.world.within(group)
        return own

    def __deepcopy__(self, _memo: object) -> Grid:
        return self  # there is one, also when a module that refers to it is copied

    @cached_property  # every step asks
    def is_counted(self) -> bool:
        """Whether this rank's counts are added up: one of the ranks that compute the same rows."""
        return self.mesh.is_counted(self.world.rank)
