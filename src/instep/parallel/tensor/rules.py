"""Operations on Slices that need nothing but the shards ([Note: Slices]).

A rule gets the arguments of `__torch_function__`, and returns NotImplemented where it does not apply: then the tensors
are gathered. Functions are known by their names, which torch, torch.Tensor and torch.nn.functional share.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from instep.parallel.tensor.group import copy_to_group, redistribute
from instep.parallel.tensor.slice import Slice, record_uneven
from instep.world.device import ACCELERATORS

Rule = Callable[[Any, Any, Any], Any]


def _names(text: str) -> list[str]:
    return text.split()


METADATA = frozenset(
    _names("""
    shape size dim ndim ndimension numel nelement dtype device layout requires_grad is_floating_point
    is_complex is_cpu is_leaf is_sparse is_nested is_meta is_quantized is_mps is_xla element_size
    itemsize __len__ __hash__ __repr__ names _backward_hooks grad_fn output_nr
""")
) | {f"is_{kind}" for kind in ACCELERATORS}
"""What a Slice knows of the whole tensor without communication."""
_ELEMENTWISE = _names("""
    abs absolute add __add__ __radd__ sub __sub__ __rsub__ subtract rsub mul __mul__ __rmul__ multiply div
    __truediv__ __rtruediv__ __rdiv__ __div__ divide true_divide neg __neg__ negative pow __pow__ __rpow__
    exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tanh sigmoid erf relu relu6 gelu silu mish
    elu selu celu leaky_relu softplus hardswish hardsigmoid hardtanh tanhshrink softsign logsigmoid
    threshold clamp clip clamp_min clamp_max maximum minimum where masked_fill lerp addcmul addcdiv sign
    floor ceil round isfinite isnan isinf eq __eq__ ne __ne__ gt __gt__ ge __ge__ lt __lt__ le __le__
    logical_and logical_or logical_not __and__ __or__ __invert__ to float double half bfloat16 type_as
    contiguous clone detach nan_to_num
""")
_WITH_DIM = _names("softmax log_softmax sum mean amax amin prod logsumexp norm cumsum std var any all")


def _slices_in(tree: Any) -> list[Slice]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Slice)]


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    """Return an argument that may be given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute each element from those at the same position."""
    slices = _slices_in((args, kwargs))
    fitted = _fitted(slices[0], (args, kwargs))
    if fitted is None:
        return NotImplemented
    return slices[0].with_local(func(*fitted[0], **fitted[1]), sources=slices)


def _fitted(like: Slice, tree: Any) -> Any:
    """Replace tensors by what they broadcast to the shard; None if one does not fit."""
    is_missing = False

    def fit(tensor: torch.Tensor) -> torch.Tensor | None:
        nonlocal is_missing
        local = like.local_of(tensor)
        is_missing |= local is None
        return local

    fitted = tree_map_only(torch.Tensor, fit, tree)
    return None if is_missing else fitted


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Change each element of a shard by those at the same position."""
    fitted = _fitted(args[0], (args, kwargs))
    if fitted is None:
        return NotImplemented
    func(*fitted[0], **fitted[1])
    return args[0]


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute along other dimensions than the sharded one."""
    x, *rest = args
    dims = _argument(args, kwargs, 2 if func.__name__ == "norm" else 1, "dim", None)
    if dims is None or isinstance(dims, bool):
        return NotImplemented
    dims = {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}
    if x.positive_dim in dims:
        return NotImplemented
    local = func(x.local, *rest, **kwargs)
    if not isinstance(local, torch.Tensor):
        return NotImplemented
    if local.dim() == x.dim():
        return x.with_local(local)
    return x.with_local(local, x.shard_dim + sum(dim > x.positive_dim for dim in dims))


def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply batches of matrices where a batch dimension is sharded."""
    if kwargs or _slices_in(args)[0].shard_dim > -3:
        return NotImplemented
    return _elementwise(func, args, kwargs)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attend, each rank with its heads."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    q, k, v, mask, p = (_argument(args, kwargs, n, name, None) for n, name in enumerate(names))
    if p:
        return NotImplemented  # the noise must neither repeat on other ranks nor depend on their number
    if not isinstance(q, Slice) or q.shard_dim > -3:
        return NotImplemented
    if kwargs.get("enable_gqa"):  # a rank's queries need the same rank's keys, if each has as many
        local_kv = [x.local if isinstance(x, Slice) and x.shard_dim == q.shard_dim else None for x in (k, v)]
        if any(x.shape[q.shard_dim] % q.group.size for x in (q, k, v)):
            return NotImplemented
    else:
        local_kv = [q.local_of(x) for x in (k, v)]
    local_mask = q.local_of(mask) if mask is not None else None
    if any(x is None for x in local_kv) or (mask is not None and local_mask is None):
        return NotImplemented
    named = {name: value for name, value in kwargs.items() if name not in names}
    local = func(q.local, *local_kv, local_mask, 0.0, *args[5:], **named)
    return q.with_local(local, sources=_slices_in((k, v)))


def _over_last(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalise, or map, along the last dimensions, with weights that all ranks hold."""
    x, *rest = args
    if func.__name__ == "linear":
        num_used = 1
    else:
        shape = _argument(args, kwargs, 1, "normalized_shape", None)
        num_used = len(shape) if shape is not None else x.dim()
    if x.shard_dim >= -num_used or _slices_in((rest, kwargs)):
        return NotImplemented
    rest, named = tree_map_only(torch.Tensor, lambda weight: copy_to_group(weight, x.group), (rest, kwargs))
    return x.with_local(func(x.local, *rest, **named))


def _concatenated(func: Any, args: Any, kwargs: Any) -> Any:
    """Concatenate tensors along another dimension than the sharded one."""
    tensors = args[0]
    like = _slices_in(tensors)[0]
    dim = _argument(args, kwargs, 1, "dim", 0) % like.dim()
    fits = all(x.dim() == like.dim() and x.shape[like.shard_dim] == like.full_size for x in tensors)
    return _elementwise(func, (tensors, dim), {}) if fits and dim != like.positive_dim else NotImplemented


def _dropout(_func: Any, args: Any, kwargs: Any) -> Any:
    """Drop elements by a mask that is drawn for the whole tensor: the same as without sharding."""
    x = args[0]
    p, training = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
    if _argument(args, kwargs, 3, "inplace", False):
        return NotImplemented
    if not training or p == 0:
        return x
    return x * F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True)


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """View a tensor's elements in another shape."""
    x, *given = args
    if given and isinstance(given[0], torch.dtype):
        return NotImplemented
    name = func.__name__
    shape = list(x.shape)
    if name in ("view_as", "reshape_as"):
        new = list(given[0].shape)
    elif name == "flatten":
        first, last = (_argument(args, kwargs, n, key, v) for n, key, v in ((1, "start_dim", 0), (2, "end_dim", -1)))
        first, last = first % x.dim(), last % x.dim()
        new = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    elif name == "unflatten":
        dim = _argument(args, kwargs, 1, "dim", None) % x.dim()
        new = [*shape[:dim], *_filled(_argument(args, kwargs, 2, "sizes", None), shape[dim]), *shape[dim + 1 :]]
    else:
        sizes = kwargs.get("shape", kwargs.get("size", given))
        new = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    return _reshape(x, _filled(new, x.numel()))


def _filled(sizes: Sequence[int], numel: int) -> list[int]:
    """Replace -1 by the size that it stands for."""
    known = math.prod(size for size in sizes if size != -1)
    return [numel // max(known, 1) if size == -1 else size for size in sizes]


def _reshape(x: Slice, new: list[int]) -> Any:
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


def _transposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Change the order of dimensions; a meta tensor shows the new position of the sharded one."""
    x = args[0]
    probe = torch.empty([1] * x.dim(), device="meta").expand(*[2 + (n == x.positive_dim) for n in range(x.dim())])
    moved = func(probe, *args[1:], **kwargs)
    sharded = [n for n, size in enumerate(moved.shape) if size == 3]
    if len(sharded) != 1:
        return NotImplemented
    return x.with_local(func(x.local, *args[1:], **kwargs), sharded[0] - moved.dim())


def _squeezed(func: Any, args: Any, kwargs: Any) -> Any:
    """Add or remove a dimension of size 1."""
    x, dim = args[0], _argument(args, kwargs, 1, "dim", None)
    if func.__name__ == "unsqueeze":
        dim %= x.dim() + 1
        return x.with_local(func(x.local, dim), x.shard_dim - (dim > x.positive_dim))
    if not isinstance(dim, int) or dim % x.dim() == x.positive_dim or x.shape[dim] != 1:
        return NotImplemented
    return x.with_local(func(x.local, dim), x.shard_dim + (dim % x.dim() > x.positive_dim))


def _expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat along dimensions of size 1."""
    x, *given = args
    if kwargs:
        return NotImplemented
    sizes = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    if len(sizes) < -x.shard_dim or sizes[x.shard_dim] not in (-1, x.full_size):
        return NotImplemented
    sizes[x.shard_dim] = -1
    return x.with_local(func(x.local, *sizes))


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    """Split into several tensors along a dimension."""
    x, name = args[0], func.__name__
    dim = _argument(args, kwargs, 1 if name == "unbind" else 2, "dim", 0) % x.dim()
    if dim != x.positive_dim:
        shard_dim = x.shard_dim + (1 if name == "unbind" and dim > x.positive_dim else 0)
        return tuple(x.with_local(piece, shard_dim) for piece in func(x.local, *args[1:], **kwargs))
    how = None if name == "unbind" else _argument(args, kwargs, 1, "chunks" if name == "chunk" else "split_size", None)
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


def _indexed(func: Any, args: Any, _kwargs: Any) -> Any:
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


def _of_first(rule: Rule) -> Rule:
    """Apply a rule only where the first argument is a Slice."""

    def checked(func: Any, args: Any, kwargs: Any) -> Any:
        return rule(func, args, kwargs) if args and isinstance(args[0], Slice) else NotImplemented

    return checked


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([f"{name}_" for name in _ELEMENTWISE if not name.endswith("_")], _of_first(_in_place)),
    **dict.fromkeys(_names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__"), _of_first(_in_place)),
    **dict.fromkeys(_names("view reshape view_as reshape_as flatten unflatten"), _of_first(_viewed)),
    **dict.fromkeys(_names("transpose swapaxes swapdims permute movedim moveaxis T mT t"), _of_first(_transposed)),
    **dict.fromkeys(_names("unsqueeze squeeze"), _of_first(_squeezed)),
    **dict.fromkeys(_names("chunk split unbind"), _of_first(_split)),
    **dict.fromkeys(_WITH_DIM, _of_first(_reduced)),
    **dict.fromkeys(_names("matmul __matmul__ __rmatmul__ bmm"), _matmul),
    **dict.fromkeys(_names("layer_norm rms_norm linear"), _of_first(_over_last)),
    **dict.fromkeys(_names("cat concat concatenate"), _concatenated),
    "expand": _of_first(_expanded),
    "__getitem__": _of_first(_indexed),
    "__iter__": lambda _func, args, _kwargs: iter(args[0].unbind(0)),
    "scaled_dot_product_attention": _attention,
    "dropout": _of_first(_dropout),
    "register_hook": lambda _func, args, _kwargs: args[0].local.register_hook(*args[1:]),
}
