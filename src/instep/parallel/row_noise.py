"""Noise that users draw themselves, by row of the global batch: `instep.randn_like`, and torch's own functions.

[Note: Noise of one's own]
`torch.randn_like(x)` in a model or a loss draws from torch's global generator, so that another split of the batch gives
other noise. The functions here draw by row, as dropout does ([Note: Row noise]): element e of row r of the n-th draw of
a part is a hash of (seed, step, n, r, e). A tensor without rows gets the same noise on all ranks. While a run is open,
torch's functions of the same names are these, and so are the methods of tensors that fill them with noise. Outside of a
part of a training step, in another thread, with a generator or an output of the user's, and in exact mode, where all
noise is the shard's, they are torch's.

torch.compile traces these functions as it does a user's, but not the methods. Those, and what is drawn inside of an
operator (attention on a GPU, LSTM, multinomial), stay torch's, and NoiseWatch names them: a pass that looks for noise
on behalf of compiled code runs with torch's own methods. `noise_patches.py` replaces torch's functions.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from instep.parallel.dropout import LEVELS, levels_of
from instep.parallel.row_draws import DIGITS, RowNoise

_current: RowNoise | None = None
"""Of the run that is open in this process."""


def set_current(noise: RowNoise | None) -> RowNoise | None:
    """Have functions draw from `noise` from now on; return from what before."""
    global _current
    before, _current = _current, noise
    return before


def noise_of(*tensors: Any, **options: Any) -> RowNoise | None:
    """Return what draws by row, if these arguments allow it, and a part of a training step is under way."""
    # Not `in`, which would compare the elements of a tensor.
    if _current is None or not all(
        value is None or value is False or value is torch.strided for value in options.values()
    ):
        return None
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested for tensor in tensors):
        return None  # of a subclass: a shard of a tensor
    return _current if _current.is_active() else None


def _whole(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors of which each rank has only a slice (tensor parallelism) whole: noise is that of all of it."""
    if _current is None or not _current.is_active():
        return tensors
    return tuple(t.full_tensor("noise") if hasattr(type(t), "local_range") else t for t in tensors)


def is_floating(dtype: torch.dtype) -> bool:
    return dtype in (*DIGITS, torch.float64)


def _default_device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device() cannot be traced


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(map(int, size))


def _drawn(draw: str) -> Callable[..., torch.Tensor]:
    """Return torch.rand or torch.randn by row."""
    original = getattr(torch, {"uniform": "rand", "normal": "randn"}[draw])

    @functools.wraps(original)
    def function(
        *sizes: Any,
        size: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **more: Any,
    ) -> Any:
        noise, kind = noise_of(**more), dtype or torch.get_default_dtype()
        size = sizes if size is None else (size,)
        if noise is None or not size or not is_floating(kind):
            return original(*size, dtype=dtype, device=device, requires_grad=requires_grad, **more)
        values = getattr(noise, draw)(_size(size), kind).to(_default_device() if device is None else device)
        return values.requires_grad_(requires_grad) if requires_grad else values

    return function


def _drawn_like(draw: str) -> Callable[..., torch.Tensor]:
    """Return torch.rand_like or torch.randn_like by row."""
    original = getattr(torch, {"uniform": "rand_like", "normal": "randn_like"}[draw])

    @functools.wraps(original)
    def function(
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **more: Any,
    ) -> Any:
        kind = dtype or input.dtype
        noise = noise_of(input, **{key: value for key, value in more.items() if key != "memory_format"})
        if noise is None or not is_floating(kind):
            return original(input, dtype=dtype, device=device, requires_grad=requires_grad, **more)
        values = getattr(noise, draw)(input.shape, kind).to(input.device if device is None else device)
        return values.requires_grad_(requires_grad) if requires_grad else values

    return function


rand, randn = _drawn("uniform"), _drawn("normal")
rand_like, randn_like = _drawn_like("uniform"), _drawn_like("normal")
_bernoulli, _normal, _randint, _randint_like = torch.bernoulli, torch.normal, torch.randint, torch.randint_like
_dropout, _attention = F.dropout, F.scaled_dot_product_attention


@functools.wraps(_bernoulli)
def bernoulli(input: torch.Tensor, p: float | None = None, **more: Any) -> Any:
    noise = noise_of(input, **more)
    if noise is None or not is_floating(input.dtype):
        return _bernoulli(input, **more) if p is None else _bernoulli(input, p, **more)
    drawn = noise.uniform(input.shape, input.dtype).to(input.device)
    return (drawn < (input if p is None else p)).to(input.dtype)


@functools.wraps(_normal)
def normal(mean: Any, std: Any = 1.0, size: Any = None, **more: Any) -> Any:
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    noise = noise_of(*tensors, **{key: value for key, value in more.items() if key not in ("dtype", "device")})
    dtype = tensors[0].dtype if tensors else more.get("dtype") or torch.get_default_dtype()
    if noise is None or not is_floating(dtype):
        return _normal(mean, std, **more) if size is None else _normal(mean, std, size, **more)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)) if tensors else tuple(size)
    given = tensors[0].device if tensors else more.get("device")
    device = _default_device() if given is None else given
    drawn = noise.normal(shape, dtype).to(device) * _constant(std) + _constant(mean)
    for tensor in tensors:  # as torch has it: the graph goes on to them, with a gradient of 0
        drawn = drawn + 0 * tensor if tensor.requires_grad else drawn
    return drawn


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@functools.wraps(_randint)
def randint(*numbers: Any, low: int = 0, high: int | None = None, size: Any = None, **more: Any) -> Any:
    noise = noise_of(**{key: value for key, value in more.items() if key not in ("dtype", "device", "requires_grad")})
    if size is None:
        *numbers, size = numbers  # type: ignore[assignment]
    bounds = [*numbers, *([] if high is None else [high])]
    low, high = bounds if len(bounds) == 2 else (low, bounds[0])
    if noise is None:
        return _randint(low, high, size, **more)
    values = _integers(noise, low, high, tuple(size), more.get("dtype") or torch.int64)
    device = more.get("device")
    return values.to(_default_device() if device is None else device)


@functools.wraps(_randint_like)
def randint_like(input: torch.Tensor, low: int, high: int | None = None, *, dtype: Any = None, **more: Any) -> Any:
    noise = noise_of(input, **more)
    if noise is None:
        return _randint_like(input, *((low,) if high is None else (low, high)), dtype=dtype, **more)
    first, last = (0, low) if high is None else (low, high)
    return _integers(noise, first, last, input.shape, dtype or input.dtype).to(input.device)


def _integers(noise: RowNoise, low: int, high: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    return (low + (noise.uniform(shape, torch.float64) * (high - low)).floor()).to(dtype)


@functools.wraps(_dropout)
def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and 0.0 < p < 1.0:
        (input,) = _whole(input)
    noise = noise_of(input) if training and 0.0 < p < 1.0 else None
    if noise is None:
        return _dropout(input, p, training, inplace)
    # There the heads of a row come one after the other, in the first of three dimensions.
    is_flat = not torch.compiler.is_compiling() and sys._getframe(1).f_code is F.multi_head_attention_forward.__code__
    num_rows = noise.context.num_rows
    if is_flat and input.shape[0] % num_rows == 0:
        by_head = input.view(num_rows, input.shape[0] // num_rows, *input.shape[1:])
        return _masked(noise, by_head, by_head.shape, p, inplace).view(input.shape)
    return _masked(noise, input, input.shape, p, inplace)


@functools.wraps(_attention)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # On a GPU torch's fused kernels draw inside, and save the memory that a mask would take.
    if dropout_p:
        query, key, value = _whole(query, key, value)
    noise = noise_of(query, key, value) if dropout_p and not enable_gqa and query.device.type == "cpu" else None
    if noise is None:
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    weights = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        weights = weights.masked_fill(torch.ones(weights.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else weights + attn_mask
        nothing = weights.isneginf().all(-1, keepdim=True)  # a row that may look at nothing gets 0, as torch has it
        weights = weights.masked_fill(nothing, 0.0)
        return dropout(weights.softmax(-1).masked_fill(nothing, 0.0), dropout_p) @ value
    return dropout(weights.softmax(-1), dropout_p) @ value


def channel_dropout(name: str) -> Callable[..., torch.Tensor]:
    original = getattr(F, name)

    @functools.wraps(original)
    def function(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        noise = noise_of(input) if training and 0.0 < p < 1.0 and input.dim() > 2 else None
        if noise is None:
            return original(input, p, training, inplace)
        return _masked(noise, input, input.shape[:2], p, inplace)

    return function


def _masked(noise: RowNoise, input: torch.Tensor, shape: torch.Size, p: float, inplace: bool) -> Any:
    levels = levels_of(p)
    keep = noise.keep(shape, levels).reshape(*shape, *([1] * (input.dim() - len(shape)))).to(input.device)
    mask = keep.to(input.dtype).mul_(LEVELS / levels)
    return input.mul_(mask) if inplace else input * mask
