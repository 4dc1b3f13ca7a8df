"""Rules for operations that change the shape of a Slice, or select some of its elements ([Note: Slices])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from instep.parallel.tensor.group import redistribute
from instep.parallel.tensor.slice import Slice, record_uneven


def argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    """Return an argument that may be given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """View a tensor's elements in another shape."""
    x, *given = args
    if given and isinstance(given[0], torch.dtype):
        return NotImplemented
    name = func.__name__
    shape = list(x.shape)
    if name in ("view_as", "reshape_as"):
        new = list(given[0].shape)
    elif name == "flatten":
        first, last = (argument(args, kwargs, n, key, v) for n, key, v in ((1, "start_dim", 0), (2, "end_dim", -1)))
        first, last = first % x.dim(), last % x.dim()
        new = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    elif name == "unflatten":
        dim = argument(args, kwargs, 1, "dim", None) % x.dim()
        new = [*shape[:dim], *_filled(argument(args, kwargs, 2, "sizes", None), shape[dim]), *shape[dim + 1 :]]
    else:
        sizes = kwargs.get("shape", kwargs.get("size", given))
        new = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    return reshape(x, _filled(new, x.numel()))


def _filled(sizes: Sequence[int], numel: int) -> list[int]:
    """Replace -1 by the size that it stands for."""
    known = math.prod(size for size in sizes if size != -1)
    return [numel // max(known, 1) if size == -1 else size for size in sizes]


def reshape(x: Slice, new: list[int]) -> Any:
    """Return a Slice of another shape, where the ranks' shards are still shards."""
    block = _block_with(list(x.shape), new, x.positive_dim)
    if block is None:
        return NotImplemented
    (first, last), (new_first, new_last) = block
    before, sizes = new[:new_first], tuple(new[new_first:new_last])
    after = new[new_last:]
    if sizes == (x.full_size,):
        local = x.local.reshape(*before, x.local.shape[x.positive_dim], *after)
        return x.with_local(local, -1 - len(after))
    if any(size != 1 for size in x.shape[first : x.positive_dim]):
        return NotImplemented  # a dimension before the sharded one is merged with it: shards would be interleaved
    num_ranks, local = x.group.size, x.local
    lead = next((n for n, size in enumerate(sizes) if size != 1), 0)
    # Columns that several layers share: (3, heads, …) or (2, …), not (heads, …).
    is_packed = len(sizes) > lead + 1 and sizes[lead] in (2, 3) and sizes[lead + 1] % num_ranks == 0
    if is_packed and (sizes[lead] % num_ranks or len(sizes) > lead + 2):
        shard = lead + 1
        pieces = (math.prod(sizes) // sizes[lead],) * sizes[lead]
        shape = list(local.shape)
        flat = local.reshape(*shape[:first], math.prod(shape[first:last]), *shape[last:])
        local = redistribute(flat, first, pieces, x.group)
    elif x.full_size % num_ranks == 0 and sizes[lead] % num_ranks == 0:
        shard = lead
    else:
        record_uneven(x, sizes)
        return NotImplemented
    local_sizes = [*sizes[:shard], sizes[shard] // num_ranks, *sizes[shard + 1 :]]
    local = local.reshape(*before, *local_sizes, *after)
    return x.with_local(local, -(len(sizes) - shard + len(after)), sizes[shard])


def _block_with(old: list[int], new: list[int], dim: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the smallest runs of old and new dimensions that hold the same elements, with `dim` in the old one."""
    if math.prod(old) != math.prod(new) or 0 in old:
        return None
    i = j = 0
    while i < len(old):
        i0, j0 = i, j
        left, right = old[i], new[j] if j < len(new) else 1
        i, j = i + 1, min(j + 1, len(new))
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        while i == len(old) and j < len(new):  # the remaining new dimensions have size 1
            j += 1
        if i0 <= dim < i:
            return (i0, i), (j0, j)
    return None


def transposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Change the order of dimensions; a meta tensor shows the new position of the sharded one."""
    x = args[0]
    probe = torch.empty([1] * x.dim(), device="meta").expand(*[2 + (n == x.positive_dim) for n in range(x.dim())])
    moved = func(probe, *args[1:], **kwargs)
    sharded = [n for n, size in enumerate(moved.shape) if size == 3]
    if len(sharded) != 1:
        return NotImplemented
    return x.with_local(func(x.local, *args[1:], **kwargs), sharded[0] - moved.dim())


def squeezed(func: Any, args: Any, kwargs: Any) -> Any:
    """Add or remove a dimension of size 1."""
    x, dim = args[0], argument(args, kwargs, 1, "dim", None)
    if func.__name__ == "unsqueeze":
        dim %= x.dim() + 1
        return x.with_local(func(x.local, dim), x.shard_dim - (dim > x.positive_dim))
    if not isinstance(dim, int) or dim % x.dim() == x.positive_dim or x.shape[dim] != 1:
        return NotImplemented
    return x.with_local(func(x.local, dim), x.shard_dim + (dim % x.dim() > x.positive_dim))


def expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat along dimensions of size 1."""
    x, *given = args
    if kwargs:
        return NotImplemented
    sizes = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    if len(sizes) < -x.shard_dim or sizes[x.shard_dim] not in (-1, x.full_size):
        return NotImplemented
    sizes[x.shard_dim] = -1
    return x.with_local(func(x.local, *sizes))


def split(func: Any, args: Any, kwargs: Any) -> Any:
    """Split into several tensors along a dimension."""
    x, name = args[0], func.__name__
    dim = argument(args, kwargs, 1 if name == "unbind" else 2, "dim", 0) % x.dim()
    if dim != x.positive_dim:
        shard_dim = x.shard_dim + (1 if name == "unbind" and dim > x.positive_dim else 0)
        return tuple(x.with_local(piece, shard_dim) for piece in func(x.local, *args[1:], **kwargs))
    how = None if name == "unbind" else argument(args, kwargs, 1, "chunks" if name == "chunk" else "split_size", None)
    if how is None:
        return NotImplemented
    num_ranks = x.group.size
    sizes = tuple(len(piece) for piece in func(torch.empty(x.full_size, 0, device="meta"), how))
    if any(size % num_ranks for size in sizes):
        record_uneven(x, sizes)
        return NotImplemented
    local = redistribute(x.local, x.positive_dim, sizes, x.group)
    pieces = local.split([size // num_ranks for size in sizes], x.positive_dim)
    return tuple(x.with_local(piece, size=size) for piece, size in zip(pieces, sizes, strict=True))


def indexed(func: Any, args: Any, _kwargs: Any) -> Any:
    """Index by numbers, slices, None and …, where the sharded dimension is kept whole."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if any(not (entry is None or entry is Ellipsis or type(entry) in (int, slice)) for entry in index):
        return NotImplemented
    if not any(entry is Ellipsis for entry in index):
        index = (*index, Ellipsis)
    # Write … out, so that each entry but None is one dimension's.
    at = index.index(Ellipsis)
    num_given = sum(entry is not None for entry in index) - 1
    entries = [*index[:at], *[slice(None)] * (x.dim() - num_given), *index[at + 1 :]]
    positions = [position for position, entry in enumerate(entries) if entry is not None]
    position = positions[x.positive_dim]
    if entries[position] != slice(None):
        return NotImplemented
    num_after = sum(not isinstance(entry, int) for entry in entries[position + 1 :])
    return x.with_local(func(x.local, index), -1 - num_after)
