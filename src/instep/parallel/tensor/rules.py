"""Operations on Slices that need nothing but the shards ([Note: Slices]).

A rule gets the arguments of `__torch_function__`, and returns NotImplemented where it does not apply: then the tensors
are gathered. Functions are known by their names, which torch, torch.Tensor and torch.nn.functional share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from instep.parallel.tensor import shapes
from instep.parallel.tensor.group import copy_to_group
from instep.parallel.tensor.shapes import argument
from instep.parallel.tensor.slice import Slice
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
_KEEPS_DIMS = ("softmax", "log_softmax", "cumsum")


def _slices_in(tree: Any) -> list[Slice]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Slice)]


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


def _hook(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Register a hook for the gradient of this rank's shard."""
    return args[0].local.register_hook(*args[1:])


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute along other dimensions than the sharded one."""
    x, *rest = args
    name = func.__name__
    dims = argument(args, kwargs, 2 if name == "norm" else 1, "dim", None)
    if dims is None or isinstance(dims, bool):
        return NotImplemented
    dims = {dim % x.dim() for dim in ((dims,) if isinstance(dims, int) else dims)}
    if x.positive_dim in dims:
        return NotImplemented
    local = func(x.local, *rest, **kwargs)
    if not isinstance(local, torch.Tensor):
        return NotImplemented
    if name in _KEEPS_DIMS or local.dim() == x.dim():
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
    q, k, v, mask, p = (argument(args, kwargs, n, name, None) for n, name in enumerate(names))
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
        shape = argument(args, kwargs, 1, "normalized_shape", None)
        num_used = len(shape) if shape is not None else x.dim()
    if x.shard_dim >= -num_used or _slices_in((rest, kwargs)):
        return NotImplemented
    rest, named = tree_map_only(torch.Tensor, lambda weight: copy_to_group(weight, x.group), (rest, kwargs))
    return x.with_local(func(x.local, *rest, **named))


def _concatenated(func: Any, args: Any, kwargs: Any) -> Any:
    """Concatenate tensors along another dimension than the sharded one."""
    tensors = args[0]
    like = _slices_in(tensors)[0]
    dim = argument(args, kwargs, 1, "dim", 0) % like.dim()
    if dim == like.positive_dim:
        return NotImplemented
    if any(x.dim() != like.dim() or x.shape[like.shard_dim] != like.full_size for x in tensors):
        return NotImplemented
    return _elementwise(func, (tensors, dim), {})


def _dropout(_func: Any, args: Any, kwargs: Any) -> Any:
    """Drop elements by a mask that is drawn for the whole tensor: the same as without sharding."""
    x = args[0]
    p, training = argument(args, kwargs, 1, "p", 0.5), argument(args, kwargs, 2, "training", True)
    if argument(args, kwargs, 3, "inplace", False):
        return NotImplemented
    if not training or p == 0:
        return x
    return x * F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True)


def _of_first(rule: Rule) -> Rule:
    """Apply a rule only where the first argument is a Slice."""

    def checked(func: Any, args: Any, kwargs: Any) -> Any:
        return rule(func, args, kwargs) if args and isinstance(args[0], Slice) else NotImplemented

    return checked


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([f"{name}_" for name in _ELEMENTWISE if not name.endswith("_")], _of_first(_in_place)),
    **dict.fromkeys(_names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__"), _of_first(_in_place)),
    **dict.fromkeys(_names("view reshape view_as reshape_as flatten unflatten"), _of_first(shapes.viewed)),
    **dict.fromkeys(
        _names("transpose swapaxes swapdims permute movedim moveaxis T mT t"), _of_first(shapes.transposed)
    ),
    **dict.fromkeys(_names("unsqueeze squeeze"), _of_first(shapes.squeezed)),
    **dict.fromkeys(_names("chunk split unbind"), _of_first(shapes.split)),
    **dict.fromkeys(_WITH_DIM, _of_first(_reduced)),
    **dict.fromkeys(_names("matmul __matmul__ __rmatmul__ bmm"), _matmul),
    **dict.fromkeys(_names("layer_norm rms_norm linear"), _of_first(_over_last)),
    **dict.fromkeys(_names("cat concat concatenate"), _concatenated),
    "expand": _of_first(shapes.expanded),
    "__getitem__": _of_first(shapes.indexed),
    "__iter__": lambda _func, args, _kwargs: iter(args[0].unbind(0)),
    "scaled_dot_product_attention": _attention,
    "dropout": _of_first(_dropout),
    "register_hook": _hook,
}
