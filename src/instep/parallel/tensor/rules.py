"""Operations on Slices that need nothing but the parts ([Note: Slices]).

A rule gets what `__torch_function__` gets, and gives NotImplemented where it does not apply: then the tensors are
joined. Functions are told by their names, which torch, torch.Tensor and torch.nn.functional spell alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from instep.parallel.tensor import shapes
from instep.parallel.tensor.shapes import argument
from instep.parallel.tensor.slice import Slice, union
from instep.parallel.tensor.team import enter
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
"""What a Slice knows of the whole tensor without asking anybody."""
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


def _hook(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Look at the gradient of this rank's part when it comes."""
    return args[0].local.register_hook(*args[1:])


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute along other dimensions than the shared one."""
    x = args[0]
    name = func.__name__
    place = 2 if name == "norm" else 1
    dims = argument(args, kwargs, place, "dim", None)
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
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    q, k, v, mask, p = (argument(args, kwargs, n, name, None) for n, name in enumerate(names))
    if p:
        return NotImplemented  # one rank's noise must not be another's, nor depend on how many there are
    if not isinstance(q, Slice) or q.place > -3:
        return NotImplemented
    if kwargs.get("enable_gqa"):  # a rank's queries need the same rank's keys, if each has as many
        kept = [each.local if isinstance(each, Slice) and each.place == q.place else None for each in (k, v)]
        if any(each.shape[q.place] % q.team.size for each in (q, k, v)):
            return NotImplemented
    else:
        kept = [q.fit(each) for each in (k, v)]
    fitted = q.fit(mask) if mask is not None else None
    if any(each is None for each in kept) or (mask is not None and fitted is None):
        return NotImplemented
    named = {name: value for name, value in kwargs.items() if name not in names}
    local = func(q.local, *kept, fitted, 0.0, *args[5:], **named)
    return Slice(local, q.place, q.size_shared, q.team, union([each for each in (q, k, v) if isinstance(each, Slice)]))


def _over_last(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalise, or map, along the last dimensions, with weights that all ranks hold."""
    x = args[0]
    if not isinstance(x, Slice):
        return NotImplemented
    if func.__name__ == "linear":
        num_used = 1
    else:
        shape = argument(args, kwargs, 1, "normalized_shape", None)
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
    dim = argument(args, kwargs, 1, "dim", 0)
    if any(each.dim() != like.dim() or each.shape[like.place] != like.size_shared for each in tensors):
        return NotImplemented
    if dim % like.dim() == like.axis:
        return NotImplemented
    fitted = [like.fit(each) for each in tensors]
    if any(each is None for each in fitted):
        return NotImplemented
    return Slice(func(fitted, dim % like.dim()), like.place, like.size_shared, like.team, union(slices))


def _dropout(_func: Any, args: Any, kwargs: Any) -> Any:
    """Drop elements by a mask that is drawn for the whole tensor: the same one as without a team."""
    x = args[0]
    p, training = argument(args, kwargs, 1, "p", 0.5), argument(args, kwargs, 2, "training", True)
    if not isinstance(x, Slice) or argument(args, kwargs, 3, "inplace", False):
        return NotImplemented
    if not training or p == 0:
        return x
    return x * F.dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([f"{name}_" for name in _ELEMENTWISE if not name.endswith("_")], _in_place),
    **dict.fromkeys(_names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__"), _in_place),
    **dict.fromkeys(_names("view reshape view_as reshape_as flatten unflatten"), shapes.other_shape),
    **dict.fromkeys(_names("transpose swapaxes swapdims permute movedim moveaxis T mT t"), shapes.other_order),
    **dict.fromkeys(_names("unsqueeze squeeze"), shapes.one_dim_more_or_less),
    **dict.fromkeys(_names("chunk split unbind"), shapes.pieces),
    **dict.fromkeys(_WITH_DIM, _reduced),
    **dict.fromkeys(_names("matmul __matmul__ __rmatmul__ bmm"), _matmul),
    **dict.fromkeys(_names("layer_norm rms_norm linear"), _over_last),
    **dict.fromkeys(_names("cat concat concatenate"), _concatenated),
    "expand": shapes.expanded,
    "__getitem__": shapes.item,
    "__iter__": shapes.each,
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "register_hook": _hook,
}
