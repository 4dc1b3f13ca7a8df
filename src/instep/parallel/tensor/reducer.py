"""Gradients of a model whose layers a team of ranks shares.

[Note: Whole parameters stay the same]
A parameter that every rank of a team holds whole gets its gradient from the same numbers on each, so the gradients are
the same, until a kernel adds up in another order on one of them (atomics on GPUs, another processor). Ranks that differ
in one bit drift apart. So such a gradient is not each rank's own: one rank of each team counts, and all ranks get the
same sum. It travels with the loss, so it costs no collective more than data parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from instep.parallel.ddp import DdpReducer
from instep.parallel.spread import SpreadReducer
from instep.parallel.strategy import StepSums
from instep.world.grid import Grid


def is_split(parameter: torch.Tensor) -> bool:
    """Tell whether ranks share a parameter, so that each has a part."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def num_split(model: nn.Module) -> int:
    """Count the elements of parameters that ranks share."""
    return sum(p.numel() for p in model.parameters() if is_split(p))


class TensorReducer(SpreadReducer):
    """Adds gradients up: those of parts over the ranks with the same parts, the others over all ranks, one a team."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid) -> None:
        super().__init__(parameters, grid)
        parts = [p for p in self.parameters if is_split(p)]
        whole = [p for p in self.parameters if not is_split(p)]
        self._of_whole = DdpReducer(whole, grid.world, counted=grid.is_counted)
        has_copies = parts and grid.data.world_size > 1
        self._of_parts = DdpReducer(parts, grid.data) if has_copies else None

    def reduce(self, sums: StepSums) -> StepSums:
        if self._of_parts is not None:
            self._of_parts.reduce(StepSums())
        return self._of_whole.reduce(sums)
