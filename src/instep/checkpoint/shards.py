"""DTensors: which box of a tensor this rank holds, and how to read a checkpoint into another sharding.

No collectives: the position of a shard follows from the mesh and the placements.

[Note: Strided shards]
fully_shard over a tensor-parallel layer shards once more what tensor parallelism has left to the rank. If both shard
the same dimension, torch lists the first sharding last and calls the other one strided. Its stride is the number of
tensor-parallel shards, so applying the plain shardings first and the strided one last gives the rows that a rank holds:
they are contiguous. A stride that is not that number means another layout, which is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from instep.checkpoint.reader import StoredTensor
from instep.checkpoint.save_plan import MIN_BALANCED_BYTES, Box, Key, LocalShard, chunk_box
from instep.checkpoint.snapshot import FlatState
from instep.checkpoint.state_tree import local_tensor
from instep.checkpoint.writer import dtype_name
from instep.core.errors import CheckpointError


def local_box(tensor: torch.Tensor) -> Box:
    """Return the box of a tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of meshes that it is part of"
    plain, strided = [], []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            chunk = (placement.dim, tensor.device_mesh.size(axis), coordinate[axis])
            if isinstance(placement, _StridedShard):
                _check_stride(tensor, axis, placement)
                strided.append(chunk)
            else:
                plain.append(chunk)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"a tensor that is placed as {placement} cannot be saved: no rank has its values. Reduce it first."
            )
    box = chunk_box(tensor.shape, [*plain, *strided])
    if box.shape != tuple(local_tensor(tensor).shape):
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} placed as {tensor.placements} should leave {list(box.shape)} "
            f"to this rank, which has {list(local_tensor(tensor).shape)}: instep does not know this layout."
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


def local_shard(key: Key, state: FlatState) -> LocalShard:
    """Describe what this rank holds of a tensor of its state."""
    tensor = state.tensors[key]
    is_large = tensor.numel() * tensor.element_size() >= MIN_BALANCED_BYTES
    distributed = isinstance(tensor, DTensor) or (is_large and key[0] not in state.uneven)
    dtype = dtype_name(tensor.dtype, key[1])
    return LocalShard(dtype, tuple(tensor.shape), local_box(tensor), distributed)


def read_like(stored: StoredTensor, like: Any) -> torch.Tensor:
    """Read this rank's shard if `like` is a DTensor of the same shape, else the whole tensor."""
    if not isinstance(like, DTensor) or like.shape != stored.shape:
        return stored.read()
    tensor = torch.empty_like(like.detach(), dtype=stored.dtype)
    local_tensor(tensor).copy_(stored.read(local_box(like)))
    return tensor


def read_for_parameter(stored: StoredTensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """Read a tensor of an optimizer's state, sharded as its parameter if both have the same shape."""
    if not isinstance(parameter, DTensor) or not stored.shape:
        return _in_format(stored.read(), parameter)
    if stored.shape == parameter.shape:
        return read_like(stored, parameter)
    # It is neither a counter nor shaped as the parameter, but is computed with it, so it must be on the same mesh.
    mesh = parameter.device_mesh
    whole = stored.read().to(local_tensor(parameter).device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _in_format(value: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor in the memory format of its parameter, if both have the same shape: fused optimizers need it."""
    if parameter is None or parameter.is_contiguous() or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def reshard(tree: Any, like: Any, is_partial: bool) -> Any:
    """Read a stored tree, with each tensor sharded as the one at the same place in `like`.

    `is_partial`: this rank may have only some of the names (a pipeline stage); the others are left out.
    """
    if isinstance(tree, StoredTensor):
        return read_like(tree, like)
    if isinstance(tree, Mapping):
        known = like if isinstance(like, Mapping) else {}
        names = set(tree)
        if is_partial and any(isinstance(value, torch.Tensor) for value in known.values()):
            names = {key for key in names if key in known or not isinstance(tree[key], StoredTensor)}
        return {key: reshard(value, known.get(key), is_partial) for key, value in tree.items() if key in names}
    if isinstance(tree, list | tuple):
        known_items = like if isinstance(like, list | tuple) and len(like) == len(tree) else [None] * len(tree)
        return type(tree)([reshard(value, item, is_partial) for value, item in zip(tree, known_items, strict=True)])
    return tree
