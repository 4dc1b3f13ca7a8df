"""Gloo between machines, for the lane's hierarchy ([Note: Hierarchical all-reduce])."""

from __future__ import annotations

import torch
import torch.distributed as dist

from instep.world.lane.reduction import Reduction

_OPS = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX, Reduction.MIN: dist.ReduceOp.MIN}


class InterNodeGroup:
    """The ranks at one place of all machines, over gloo."""

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo = gloo

    def all_reduce(self, share: torch.Tensor, how: Reduction) -> None:
        """Combine the machines' shares, in place. Called on all ranks of the rail."""
        if share.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[how]
            self._gloo.allreduce([share], options).wait()

    def broadcast(self, flat: torch.Tensor, machine: int) -> None:
        """Overwrite with what the rank on that machine has. Called on all ranks of the rail."""
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank = machine
            self._gloo.broadcast([flat], options).wait()
