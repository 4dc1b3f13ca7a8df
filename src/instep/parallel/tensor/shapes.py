"""Rules for operations that lay the elements of a Slice out otherwise, or take some of them ([Note: Slices])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from instep.parallel.tensor.slice import Slice, note_uneven
from instep.parallel.tensor.team import pass_on


def argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    if len(args) > place:
        return args[place]
    return kwargs.get(name, default)


def other_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """See a tensor's elements in another shape."""
    x, *given = args
    if not isinstance(x, Slice):
        return NotImplemented
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
    """Put a number in the place of -1."""
    known = math.prod(size for size in sizes if size != -1)
    return [numel // max(known, 1) if size == -1 else size for size in sizes]


def reshape(x: Slice, new: list[int]) -> Any:
    """Give a Slice another shape, where the ranks' parts stay parts."""
    block = _block_with(list(x.shape), new, x.axis)
    if block is None:
        return NotImplemented
    (first, last), (new_first, new_last) = block
    before, sizes = new[:new_first], tuple(new[new_first:new_last])
    after = new[new_last:]
    if sizes == (x.size_shared,):
        local = x.local.reshape(*before, x.local.shape[x.axis], *after)
        return x.like(local, -1 - len(after))
    if any(size != 1 for size in x.shape[first : x.axis]):
        return NotImplemented  # something lies around the shared dimension: the parts would be interleaved
    team, total = x.team, math.prod(sizes)
    lead = next((n for n, size in enumerate(sizes) if size != 1), 0)
    packed = _is_packed(sizes[lead:]) and sizes[lead + 1] % team.size == 0
    if packed and (sizes[lead] % team.size or len(sizes) > lead + 2):
        shared, flat = lead + 1, (total // sizes[lead],) * sizes[lead]
    elif x.size_shared % team.size == 0 and sizes[lead] % team.size == 0:
        shared, flat = lead, None
    else:
        note_uneven(x, sizes)
        return NotImplemented
    local = x.local
    if flat is not None:
        around = list(local.shape)
        one = local.reshape(*around[:first], math.prod(around[first:last]), *around[last:])
        local = pass_on(one, first, flat, team)
    parts = [*sizes[:shared], sizes[shared] // team.size, *sizes[shared + 1 :]]
    local = local.reshape(*before, *parts, *after)
    return x.like(local, -(len(sizes) - shared + len(after)), sizes[shared])


def _is_packed(sizes: Sequence[int]) -> bool:
    """Tell whether columns that are cut like this are several layers' in one: (3, heads, …), (2, …), not (heads, …)."""
    return len(sizes) > 1 and sizes[0] in (2, 3)


def _block_with(old: list[int], new: list[int], axis: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Find the smallest runs of old and new dimensions that hold the same elements, with `axis` in the old one."""
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
        while i == len(old) and j < len(new):  # what is left of the new ones is of size 1
            j += 1
        if i0 <= axis < i:
            return (i0, i), (j0, j)
    return None


def other_order(func: Any, args: Any, kwargs: Any) -> Any:
    """Change the order of dimensions; found out on a tensor without elements."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    probe = torch.empty([1] * x.dim(), device="meta").expand(*[2 + (n == x.axis) for n in range(x.dim())])
    moved = func(probe, *args[1:], **kwargs)
    shared = [n for n, size in enumerate(moved.shape) if size == 3]
    if len(shared) != 1:
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs), shared[0] - moved.dim())


def one_dim_more_or_less(func: Any, args: Any, kwargs: Any) -> Any:
    """Add a dimension, or take out one of size 1."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    if func.__name__ == "unsqueeze":
        dim = argument(args, kwargs, 1, "dim", None) % (x.dim() + 1)
        return x.like(func(x.local, dim), x.place - (dim > x.axis))
    dim = argument(args, kwargs, 1, "dim", None)
    if not isinstance(dim, int) or dim % x.dim() == x.axis or x.shape[dim] != 1:
        return NotImplemented
    return x.like(func(x.local, dim), x.place + (dim % x.dim() > x.axis))


def expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat along dimensions of size 1."""
    x, *given = args
    if not isinstance(x, Slice) or kwargs:
        return NotImplemented
    sizes = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    if len(sizes) < -x.place or sizes[x.place] not in (-1, x.size_shared):
        return NotImplemented
    sizes[x.place] = -1
    return x.like(func(x.local, *sizes))


def pieces(func: Any, args: Any, kwargs: Any) -> Any:
    """Cut into pieces along a dimension."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    name = func.__name__
    dim = argument(args, kwargs, 1 if name == "unbind" else 2, "dim", 0) % x.dim()
    if dim != x.axis:
        place = x.place + (1 if name == "unbind" and dim > x.axis else 0)
        return tuple(x.like(piece, place) for piece in func(x.local, *args[1:], **kwargs))
    if name == "unbind":
        return NotImplemented
    how = argument(args, kwargs, 1, "chunks" if name == "chunk" else "split_size", None)
    if how is None:
        return NotImplemented
    sizes = tuple(len(piece) for piece in func(torch.empty(x.size_shared, 0, device="meta"), how))
    if any(size % x.team.size for size in sizes):
        note_uneven(x, sizes)
        return NotImplemented
    local = pass_on(x.local, x.axis, sizes, x.team)
    parts = local.split([size // x.team.size for size in sizes], x.axis)
    return tuple(x.like(part, size=size) for part, size in zip(parts, sizes, strict=True))


def item(func: Any, args: Any, _kwargs: Any) -> Any:
    """Index by numbers, slices, None and …, where the shared dimension is left alone."""
    x, index = args
    if not isinstance(x, Slice):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if any(not (each is None or each is Ellipsis or type(each) in (int, slice)) for each in index):
        return NotImplemented
    if sum(each is Ellipsis for each in index) == 0:
        index = (*index, Ellipsis)
    at = index.index(Ellipsis)
    num_after = sum(each is not None for each in index[at + 1 :])
    num_before = sum(each is not None for each in index[:at])
    if x.axis < num_before:
        touched, later = _nth(index, x.axis)
        remaining = sum(not isinstance(each, int) for each in later if each is not Ellipsis)
        remaining += x.dim() - num_before - num_after
    elif x.axis >= x.dim() - num_after:
        from_end = index[at + 1 :]
        touched, later = _nth(from_end, x.axis - (x.dim() - num_after))
        remaining = sum(not isinstance(each, int) for each in later)
    else:
        touched = slice(None)
        remaining = x.dim() - num_after - x.axis - 1 + sum(not isinstance(each, int) for each in index[at + 1 :])
    if touched != slice(None):
        return NotImplemented
    return x.like(func(x.local, index), -1 - remaining)


def _nth(index: tuple[Any, ...], number: int) -> tuple[Any, tuple[Any, ...]]:
    """Find the index of a dimension, and what comes after it; None makes a dimension and is of none."""
    for place, each in enumerate(index):
        if each is None:
            continue
        if number == 0:
            return each, index[place + 1 :]
        number -= 1
    raise AssertionError


def each(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Go through a tensor's first dimension."""
    return iter(args[0].unbind(0))
