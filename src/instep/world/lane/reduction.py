"""What is computed from the ranks' numbers. Pure, and always in the order of the ranks, from one of them on.

A sum of floats depends on its order. Here it is (((r0 + r1) + r2) + r3)…, or one that begins with another rank and
goes around, which depends on the number's place in the tensor alone; so all ranks hold the same bits and repeated
runs do too. 16-bit floats are added up in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_HALVES = (torch.bfloat16, torch.float16)


AddUp = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""A caller's own way to add rows up, number by number; it may write to the rows that it gets."""


class Reduction(Enum):
    """How the ranks' numbers become one; of integers, a mean is rounded towards zero."""

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
"""How one rank's numbers are added to what there is."""


def combine(how: Reduction, parts: Sequence[torch.Tensor], out: torch.Tensor, spare: torch.Tensor) -> None:
    """Combine the parts, given in the order of the ranks, into `out`, which may be one of them.

    `spare` is room for what lies between, at least as large, of `spare_dtype`: memory that is new in every call
    would cost more than the additions.
    """
    step = STEPS[how]
    first, *rest, last = parts
    total = spare[: out.numel()]
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


def spare_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype numbers are added up; a mean must not overflow on its way."""
    return torch.float32 if dtype in _HALVES else dtype


def divide(total: torch.Tensor, count: int) -> None:
    """Make a sum a mean, in place."""
    if total.dtype.is_floating_point:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
