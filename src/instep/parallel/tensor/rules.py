"""Operations on Slices that need nothing but the parts ([Note: Slices]).

A rule gets what `__torch_function__` gets, and gives NotImplemented where it does not apply: then the tensors are
joined. Functions are told by their names, which torch, torch.Tensor and torch.nn.functional spell alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from instep.parallel.tensor.slice import Slice, note_uneven, union
from instep.parallel.tensor.team import enter, pass_on

Rule = Callable[[Any, Any, Any], Any]

METADATA = set(
    ["shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout", "requires_grad", "is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_leaf", "is_sparse", "is_nested", "is_meta", "is_quantized", "is_mps", "is_xla", "element_size", "itemsize", "__len__", "__hash__", "__repr__", "names", "_backward_hooks", "grad_fn", "output_nr"]
)
"""What a Slice knows of the whole tensor without asking anybody."""

_ELEMENTWISE = ["abs", "absolute", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "subtract", "rsub", "mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "__rtruediv__", "__rdiv__", "__div__", "divide", "true_divide", "neg", "__neg__", "negative", "pow", "__pow__", "__rpow__", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "hardswish", "hardsigmoid", "hardtanh", "tanhshrink", "softsign", "logsigmoid", "threshold", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "sign", "floor", "ceil", "round", "isfinite", "isnan", "isinf", "eq", "__eq__", "ne", "__ne__", "gt", "__gt__", "ge", "__ge__", "lt", "__lt__", "le", "__le__", "logical_and", "logical_or", "logical_not", "__and__", "__or__", "__invert__", "to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone", "detach", "nan_to_num"]
_WITH_DIM = ["softmax", "log_softmax", "sum", "mean", "amax", "amin", "prod", "logsumexp", "norm", "cumsum", "std", "var", "any", "all"]
_KEEPS_DIMS = {"softmax", "log_softmax", "cumsum"}


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute each element from those in its place."""
    slices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Slice)]
    like = slices[0]
    fitted = _fitted(like, (args, kwargs))
    if fitted is None:
        return NotImplemented
    result = func(*fitted[0], **fitted[1])
    return Slice(result, like.place, like.size_shared, like.team, union(slices))


def _fitted(like: Slice, tree: Any) -> Any:
    """Replace tensors by what of them meets the part; None where one cannot."""
    missing = []

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        found = like.fit(tensor)
        if found is None:
            missing.append(tensor)
            return tensor
        return found

    fitted = tree_map_only(torch.Tensor, fit, tree)
    return None if missing else fitted


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Change each element of a part by those in its place."""
    target = args[0]
    if not isinstance(target, Slice):
        return NotImplemented  # it is whole, so what comes in is joined
    fitted = _fitted(target, (args, kwargs))
    if fitted is None:
        return NotImplemented
    func(*fitted[0], **fitted[1])
    return target


def _shape(func: Any, args: Any, kwargs: Any) -> Any:
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
        first, last = (_argument(args, kwargs, n, key, v) for n, key, v in ((1, "start_dim", 0), (2, "end_dim", -1)))
        first, last = first % x.dim(), last % x.dim()
        new = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    elif name == "unflatten":
        dim = _argument(args, kwargs, 1, "dim", None) % x.dim()
        new = [*shape[:dim], *_filled(_argument(args, kwargs, 2, "sizes", None), shape[dim]), *shape[dim + 1 :]]
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
    if x.size_shared % team.size == 0 and sizes[lead] % team.size == 0:
        shared, flat = lead, None
    elif _is_packed(sizes[lead:]) and sizes[lead + 1] % team.size == 0:
        shared, flat = lead + 1, (total // sizes[lead],) * sizes[lead]
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
    return len(sizes) > 2 or (len(sizes) == 2 and sizes[0] in (2, 3))


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


def _permuted(func: Any, args: Any, kwargs: Any) -> Any:
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


def _with_new_dim(func: Any, args: Any, kwargs: Any) -> Any:
    """Add a dimension, or take out one of size 1."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    if func.__name__ == "unsqueeze":
        dim = _argument(args, kwargs, 1, "dim", None) % (x.dim() + 1)
        return x.like(func(x.local, dim), x.place - (dim > x.axis))
    dim = _argument(args, kwargs, 1, "dim", None)
    if not isinstance(dim, int) or dim % x.dim() == x.axis or x.shape[dim] != 1:
        return NotImplemented
    return x.like(func(x.local, dim), x.place + (dim % x.dim() > x.axis))


def _expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat along dimensions of size 1."""
    x, *given = args
    if not isinstance(x, Slice) or kwargs:
        return NotImplemented
    sizes = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)
    if len(sizes) < -x.place or sizes[x.place] not in (-1, x.size_shared):
        return NotImplemented
    sizes[x.place] = -1
    return x.like(func(x.local, *sizes))


def _pieces(func: Any, args: Any, kwargs: Any) -> Any:
    """Cut into pieces along a dimension."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    name = func.__name__
    dim = _argument(args, kwargs, 1 if name == "unbind" else 2, "dim", 0) % x.dim()
    if dim != x.axis:
        place = x.place + (1 if name == "unbind" and dim > x.axis else 0)
        return tuple(x.like(piece, place) for piece in func(x.local, *args[1:], **kwargs))
    if name == "unbind":
        return NotImplemented
    how = _argument(args, kwargs, 1, "chunks" if name == "chunk" else "split_size", None)
    if how is None:
        return NotImplemented
    sizes = tuple(len(piece) for piece in func(torch.empty(x.size_shared, 0, device="meta"), how))
    if any(size % x.team.size for size in sizes):
        note_uneven(x, sizes)
        return NotImplemented
    local = pass_on(x.local, x.axis, sizes, x.team)
    parts = local.split([size // x.team.size for size in sizes], x.axis)
    return tuple(x.like(part, size=size) for part, size in zip(parts, sizes, strict=True))


def _item(func: Any, args: Any, kwargs: Any) -> Any:
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


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute along other dimensions than the shared one."""
    x = args[0]
    name = func.__name__
    place = 2 if name == "norm" else 1
    dims = _argument(args, kwargs, place, "dim", None)
    if not isinstance(x, Slice) or dims is None or isinstance(dims, bool):
        return NotImplemented
    dims = {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}
    if x.axis in dims:
        return NotImplemented
    rest = [each for n, each in enumerate(args) if n > 0]
    local = func(x.local, *rest, **kwargs)
    if not isinstance(local, torch.Tensor):
        return NotImplemented
    if name in _KEEPS_DIMS or local.dim() == x.dim():
        return x.like(local)
    return x.like(local, x.place + sum(dim > x.axis for dim in dims))


def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply matrices, many at once, where the ranks share the many."""
    a, b = args[:2]
    slices = [each for each in (a, b) if isinstance(each, Slice)]
    like = slices[0]
    if kwargs or like.place > -3:
        return NotImplemented
    left, right = like.fit(a), like.fit(b)
    if left is None or right is None:
        return NotImplemented
    return Slice(func(left, right), like.place, like.size_shared, like.team, union(slices))


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attend, each rank with its heads."""
    q, k, v = args[:3] if len(args) >= 3 else (None,) * 3
    mask = _argument(args, kwargs, 3, "attn_mask", None)
    if _argument(args, kwargs, 4, "dropout_p", 0.0):
        return NotImplemented  # one rank's noise must not be another's, nor depend on how many there are
    if not isinstance(q, Slice) or q.place > -3:
        return NotImplemented
    if kwargs.get("enable_gqa"):
        kept = [each.local if isinstance(each, Slice) and each.place == q.place else None for each in (k, v)]
        if any(each.shape[q.place] % q.team.size for each in (q, k, v)):
            return NotImplemented
    else:
        kept = [q.fit(each) for each in (k, v)]
    fitted_mask = q.fit(mask) if mask is not None else None
    if any(each is None for each in kept) or (mask is not None and fitted_mask is None):
        return NotImplemented
    rest = args[4:]
    named = {key: value for key, value in kwargs.items() if key != "attn_mask"}
    if mask is not None and not rest:
        named["attn_mask"] = fitted_mask
    local = func(q.local, *kept, fitted_mask, *rest, **named) if rest else func(q.local, *kept, **named)
    return Slice(local, q.place, q.size_shared, q.team, union([each for each in (q, k, v) if isinstance(each, Slice)]))


def _over_last(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalise, or map, along the last dimensions, with weights that all ranks hold."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    if func.__name__ == "linear":
        num_used = 1
    else:
        shape = _argument(args, kwargs, 1, "normalized_shape", None)
        num_used = len(shape) if shape is not None else x.dim()
    weights = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, torch.Tensor)]
    if x.place >= -num_used or any(isinstance(each, Slice) for each in weights):
        return NotImplemented
    rest, named = tree_map_only(torch.Tensor, lambda each: enter(each, x.team), (args[1:], kwargs))
    return x.like(func(x.local, *rest, **named))


def _concatenated(func: Any, args: Any, kwargs: Any) -> Any:
    """Put tensors one after the other, along another dimension than the shared one."""
    tensors = args[0]
    slices = [each for each in tensors if isinstance(each, Slice)]
    like = slices[0]
    dim = _argument(args, kwargs, 1, "dim", 0)
    if any(each.dim() != like.dim() or each.shape[like.place] != like.size_shared for each in tensors):
        return NotImplemented
    if dim % like.dim() == like.axis:
        return NotImplemented
    fitted = [like.fit(each) for each in tensors]
    if any(each is None for each in fitted):
        return NotImplemented
    return Slice(func(fitted, dim % like.dim()), like.place, like.size_shared, like.team, union(slices))


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Drop elements by a mask that is drawn for the whole tensor: the same one as without a team."""
    x = args[0]
    p, training = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
    if not isinstance(x, Slice) or _argument(args, kwargs, 3, "inplace", False):
        return NotImplemented
    if not training or p == 0:
        return x
    return x * F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True)


def _each(func: Any, args: Any, _kwargs: Any) -> Any:  # noqa: ARG001
    """Go through a tensor's first dimension."""
    return iter(args[0].unbind(0))


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    if len(args) > place:
        return args[place]
    return kwargs.get(name, default)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([f"{name}_" for name in _ELEMENTWISE if not name.endswith("_")], _in_place),
    **dict.fromkeys(["__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"], _in_place),
    **dict.fromkeys(["view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"], _shape),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "T", "mT", "t"], _permuted),
    **dict.fromkeys(["unsqueeze", "squeeze"], _with_new_dim),
    **dict.fromkeys(["chunk", "split", "unbind"], _pieces),
    **dict.fromkeys(_WITH_DIM, _reduced),
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm"], _matmul),
    **dict.fromkeys(["layer_norm", "rms_norm", "linear"], _over_last),
    **dict.fromkeys(["cat", "concat", "concatenate"], _concatenated),
    "expand": _expanded,
    "__getitem__": _item,
    "__iter__": _each,
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
}
