"""What is computed from the ranks' elements. Pure, and always in the order of the ranks, starting at one of them.

A sum of floats depends on its order. Here it is (((r0 + r1) + r2) + r3)…, or an order that starts at another rank and
wraps around; where it starts depends only on the element's position in the tensor. So all ranks hold the same bits, in
every run. 16-bit floats are added up in float32 and rounded once.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_HALVES = (torch.bfloat16, torch.float16)


Rows = Sequence[torch.Tensor]
"""Tensors of one length, contiguous and 1-D."""
AddUp = Callable[[Rows], torch.Tensor]
"""A caller's function that adds rows up, element by element; it may write to the rows."""


class Reduction(Enum):
    """How the ranks' elements are combined; a mean of integers is rounded towards zero."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


STEPS: dict[Reduction, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MEAN: torch.add,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}
"""How one more rank's elements are combined with the total so far."""


def combine(how: Reduction, parts: Sequence[torch.Tensor], out: torch.Tensor, accumulator: torch.Tensor) -> None:
    """Combine the parts, given in the order of the ranks, into `out`, which may be one of them.

    `accumulator` holds intermediate totals: at least as large, of `accumulation_dtype`. Fresh memory in every call
    would cost more than the additions.
    """
    step = STEPS[how]
    first, *rest, last = parts
    total = accumulator[: out.numel()]
    if total.dtype == out.dtype:
        for part in rest:
            first = step(first, part, out=total)
        step(first, last, out=out)
        if how is Reduction.MEAN:
            divide(out, len(parts))
        return
    total.copy_(first)
    for part in (*rest, last):
        step(total, part, out=total)
    if how is Reduction.MEAN:
        divide(total, len(parts))
    out.copy_(total)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements are added up."""
    return torch.float32 if dtype in _HALVES else dtype


def divide(total: torch.Tensor, count: int) -> None:
    """Turn a sum into a mean, in place."""
    if total.dtype.is_floating_point:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
