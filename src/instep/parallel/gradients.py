"""Gradients of a distributed model: this rank's shards of them, their norm over all ranks, clipping."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.world.grid import Grid


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a DTensor with the shape and placements of `like`; plain where `like` is plain."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def by_dtype(parameters: Sequence[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Return the parameters of each dtype, in their order."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.dtype, []).append(p)
    return groups


def copy_gradients(views: list[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Copy gradients into views of a flat buffer: zeros for a missing one, a sparse one made dense."""
    dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
    if len(dense) == len(grads):
        torch._foreach_copy_(views, dense)
        return
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad.to_dense() if grad.is_sparse else grad)


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients that exist."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def _num_copies(parameter: nn.Parameter, grid: Grid) -> float:
    """Return how many ranks of a stage hold the same shard of a parameter."""
    num_ranks = grid.mesh.size // grid.mesh.pp
    if not isinstance(parameter, DTensor):
        return num_ranks
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # a parameter sharded along two axes has a _StridedShard, which is no Shard
            num_ranks //= parameter.device_mesh.size(axis)
    return num_ranks


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    grid: Grid | None = None,
    num_stages_with: Mapping[nn.Parameter, int] | None = None,
) -> torch.Tensor:
    """Clip gradients by their global norm, as torch.nn.utils.clip_grad_norm_ does; return the norm before.

    If `max_norm` is infinite, they are only read. With a grid they are shards, or belong to a stage: the norm is that
    of all ranks' together, and all ranks call this. Each rank adds up its own shards; one that several ranks hold
    counts by its share. `num_stages_with` is the number of stages that hold a parameter, where that is more than one.
    """
    if grid is None:
        if max_norm == math.inf:
            return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    square = torch.zeros((), dtype=torch.float64, device=grid.world.device)
    held = [p for p in parameters if p.grad is not None and to_local(p.grad).numel()]
    if held:
        norms = torch.stack([n.to(torch.float64) for n in torch._foreach_norm(local_gradients(held))])
        copies = [_num_copies(p, grid) * (num_stages_with or {}).get(p, 1) for p in held]
        square += (norms.square() / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
    norm = grid.world.all_reduce(square).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = local_gradients(parameters)
    if gradients and max_norm != math.inf:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
    return norm
