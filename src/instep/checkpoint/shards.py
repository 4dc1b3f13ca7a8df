"""Tensors of which a rank holds a shard (DTensor): what it has of them, and how they are filled again.

Room: no collective; a shard's place follows from the mesh and the placements.

[Note: Strided shards]
fully_shard over a tensor-parallel layer cuts what tensor parallelism has left to the rank once more. Where both cut the
same dimension, torch writes the first cut down last and calls the other one strided. Its stride is the number of the
tensor-parallel shards, so that making the plain cuts first and the strided one last gives the rows that a rank holds:
they follow each other. A stride that is not that number means another layout, which is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from instep.checkpoint.pieces import SPREAD_BYTES, Box, Key, LocalShard, cut_out
from instep.checkpoint.stored import Stored
from instep.checkpoint.stream import name_of_dtype
from instep.checkpoint.tree import local_of
from instep.core.errors import CheckpointError


def box_of(tensor: torch.Tensor) -> Box:
    """Tell which part of a tensor this rank has."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of meshes that it is part of"
    plain, strided = [], []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            cut = (placement.dim, tensor.device_mesh.size(axis), coordinate[axis])
            if isinstance(placement, _StridedShard):
                _check_stride(tensor, axis, placement)
                strided.append(cut)
            else:
                plain.append(cut)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"a tensor that is {placement} over the ranks cannot be saved: no rank has its values."
            )
    box = cut_out(tensor.shape, [*plain, *strided])
    if box.shape != tuple(local_of(tensor).shape):
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} placed as {tensor.placements} should leave {list(box.shape)} "
            f"to this rank, which has {list(local_of(tensor).shape)}: instep does not know this layout."
        )
    return box


def _check_stride(tensor: DTensor, axis: int, placement: _StridedShard) -> None:
    later = range(axis + 1, tensor.device_mesh.ndim)
    inner = [
        i for i in later if isinstance(p := tensor.placements[i], Shard | _StridedShard) and p.dim == placement.dim
    ]
    if placement.split_factor != math.prod(tensor.device_mesh.size(i) for i in inner):
        raise CheckpointError(
            f"a tensor placed as {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)} cannot be saved: "
            "instep does not know this layout."
        )


def holding_of(key: Key, tensor: torch.Tensor) -> LocalShard:
    """Describe what this rank has of a tensor."""
    is_shard = isinstance(tensor, DTensor)
    # Of what else is kept, rank 0 may know more than others: on_step of a Task runs there alone.
    is_dealt_out = not key[0].startswith("kept-") and tensor.numel() * tensor.element_size() >= SPREAD_BYTES
    return LocalShard(name_of_dtype(tensor.dtype), tuple(tensor.shape), box_of(tensor), is_shard or is_dealt_out)


def read_like(stored: Stored, like: Any) -> torch.Tensor:
    """Read what this rank needs of a tensor that is to be laid out as another one of its shape; else all of it."""
    if not isinstance(like, DTensor) or like.shape != stored.shape:
        return stored.read()
    made = torch.empty_like(like.detach(), dtype=stored.dtype)
    local_of(made).copy_(stored.read(box_of(like)))
    return made


def read_for(stored: Stored, parameter: torch.Tensor | None) -> torch.Tensor:
    """Read a tensor of an optimizer's state, which may be a parameter's: cut as that is where both have one shape."""
    if not isinstance(parameter, DTensor) or not stored.shape:
        return stored.read()
    if stored.shape == parameter.shape:
        return read_like(stored, parameter)
    # What is neither a counter nor like the parameter is computed with it, so it has to be on its mesh.
    mesh = parameter.device_mesh
    whole = stored.read().to(local_of(parameter).device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def fit(tree: Any, like: Any, is_partial: bool) -> Any:
    """Read a stored tree as this rank needs it: each tensor laid out as the one at its place in `like`.

    `is_partial`: this rank may have some of the names only (a stage of a pipeline); others are left out.
    """
    if isinstance(tree, Stored):
        return read_like(tree, like)
    if isinstance(tree, Mapping):
        known = like if isinstance(like, Mapping) else {}
        names = set(tree)
        if is_partial and any(isinstance(value, torch.Tensor) for value in known.values()):
            names = {key for key in names if key in known or not isinstance(tree[key], Stored)}
        return {key: fit(value, known.get(key), is_partial) for key, value in tree.items() if key in names}
    if isinstance(tree, list | tuple):
        known_items = like if isinstance(like, list | tuple) and len(like) == len(tree) else [None] * len(tree)
        return type(tree)([fit(value, item, is_partial) for value, item in zip(tree, known_items, strict=True)])
    return tree
