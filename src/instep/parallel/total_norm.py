"""The gradient's norm over all parameters of the model, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.world.grid import Grid


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Give what this rank holds of a tensor, which may be spread over several; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Give what this rank holds of the gradients that there are."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def total_norm(
    parameters: Sequence[nn.Parameter], grid: Grid, stages_with: Mapping[nn.Parameter, int] | None = None
) -> torch.Tensor:
    """Give the global norm of the gradients, which is the same on all ranks. Called on all ranks.

    Each rank adds up what it holds, and what others hold too counts by its share. `stages_with` says of how many
    stages a parameter is, where it is of several.
    """
    square = torch.zeros((), dtype=torch.float64, device=grid.world.device)
    held = [p for p in parameters if p.grad is not None and local_part(p.grad).numel()]
    if held:
        norms = torch.stack([n.to(torch.float64) for n in torch._foreach_norm(local_gradients(held))])
        copies = [_copies(p, grid) * (stages_with or {}).get(p, 1) for p in held]
        square += (norms.square() / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
    return grid.world.all_reduce(square).sqrt()


def _copies(parameter: nn.Parameter, grid: Grid) -> float:
    """How many ranks of a stage hold the same piece of a parameter."""
    ranks = grid.mesh.size // grid.mesh.pp
    if not isinstance(parameter, DTensor):
        return ranks
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # torch's own word for one that two axes cut is not Shard
            ranks //= parameter.device_mesh.size(axis)
    return ranks


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    grid: Grid | None = None,
    stages_with: Mapping[nn.Parameter, int] | None = None,
) -> torch.Tensor:
    """Clip gradients by their global norm, and return the norm before.

    With a grid the gradients are pieces, or belong to a stage: the norm is that of all ranks' together, and all ranks
    call this. `stages_with` as in `total_norm`.
    """
    if grid is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = total_norm(parameters, grid, stages_with)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if gradients := local_gradients(parameters):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
    return norm
