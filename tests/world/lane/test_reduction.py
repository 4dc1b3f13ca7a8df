"""What is computed from the ranks' numbers: in the order of the ranks, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.world.lane.reduction import DTYPES, Reduction, accumulation_dtype, combine

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def parts_of(draw: st.DrawFn, dtype: torch.dtype) -> list[torch.Tensor]:
    """Draw what 2 to 8 ranks bring: any bits at all, or floats near enough to each other that all of them count."""
    num_parts, length = draw(st.integers(2, 8)), draw(st.integers(0, 20))
    if dtype.is_floating_point and draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        return list(torch.randn(num_parts, length, generator=generator, dtype=torch.float64).to(dtype))
    bits = torch.iinfo(_BITS[dtype.itemsize])
    row = st.lists(st.integers(bits.min, bits.max), min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=num_parts, max_size=num_parts))
    return [torch.tensor(row, dtype=_BITS[dtype.itemsize]).view(dtype) for row in rows]


def in_order(how: Reduction, parts: list[torch.Tensor]) -> torch.Tensor:
    """Combine by numpy's and Python's arithmetic, one rank after the other."""
    dtype = parts[0].dtype
    if how in (Reduction.MAX, Reduction.MIN):
        pick = torch.amax if how is Reduction.MAX else torch.amin
        return pick(torch.stack(parts), 0)
    if not dtype.is_floating_point:
        sums = [wrapped(sum(column), dtype) for column in zip(*(part.tolist() for part in parts), strict=True)]
        means = [abs(total) // len(parts) * (-1 if total < 0 else 1) for total in sums]
        return torch.tensor(means if how is Reduction.MEAN else sums, dtype=dtype)
    rows = [part.numpy() if dtype == torch.float64 else part.float().numpy() for part in parts]
    with np.errstate(all="ignore"):
        total = rows[0].copy()
        for row in rows[1:]:
            total = total + row
        if how is Reduction.MEAN:
            total = total / total.dtype.type(len(parts))
    return torch.from_numpy(total).to(dtype)


def wrapped(number: int, dtype: torch.dtype) -> int:
    """Keep the low bits, as the processor does."""
    span = 2 ** torch.iinfo(dtype).bits
    return (number + span // 2) % span - span // 2


def combined(how: Reduction, parts: list[torch.Tensor], alias: int | None = None) -> torch.Tensor:
    """Combine copies, into one of them or into a tensor of its own; the others must stay as they were."""
    copies = [part.clone() for part in parts]
    out = torch.full_like(parts[0], 77) if alias is None else copies[alias]
    spare = torch.full((parts[0].numel() + 3,), 55, dtype=accumulation_dtype(out.dtype))
    combine(how, copies, out, spare)
    for place, (copy, part) in enumerate(zip(copies, parts, strict=True)):
        assert place == alias or same(copy, part)
    return out


def same(one: torch.Tensor, other: torch.Tensor, *, zeros_alike: bool = False) -> bool:
    """Return whether the bits are the same; one NaN is as good as another."""
    alike = one.view(_BITS[one.itemsize]) == other.view(_BITS[one.itemsize])
    if zeros_alike:
        alike |= one == other
    return one.shape == other.shape and bool((alike | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("how", Reduction, ids=lambda how: how.value)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_bits_are_those_of_the_ranks_order(how: Reduction, dtype: torch.dtype, data: st.DataObject) -> None:
    parts = data.draw(parts_of(dtype))
    right = in_order(how, parts)
    for alias in (None, *range(len(parts))):
        assert same(combined(how, parts, alias), right, zeros_alike=how in (Reduction.MAX, Reduction.MIN))


def test_the_order_is_not_another_one() -> None:
    parts = [torch.tensor([number]) for number in (1.0, 2.0**24, -(2.0**24))]
    assert combined(Reduction.SUM, parts).tolist() == [0.0]
    assert combined(Reduction.SUM, parts[1:] + parts[:1]).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    small = [1.0, *[eps / 4] * 4]  # in their own dtype 1 would swallow each of them
    assert combined(Reduction.SUM, [torch.tensor([n], dtype=dtype) for n in small]).tolist() == [1 + eps]


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_a_mean_of_large_halves_is_finite(num_parts: int) -> None:
    parts = [torch.tensor([60000.0], dtype=torch.float16)] * num_parts
    assert combined(Reduction.MEAN, parts).tolist() == [60000.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_mean_of_integers_is_rounded_towards_zero(dtype: torch.dtype) -> None:
    parts = [torch.tensor([n, -n, 0, -1], dtype=dtype) for n in (1, 2, 5)]
    assert combined(Reduction.MEAN, parts).tolist() == [2, -2, 0, -1]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point], ids=str)
@pytest.mark.parametrize("how", Reduction, ids=lambda how: how.value)
@pytest.mark.parametrize("num_parts", [2, 5])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_what_is_not_finite_is_not_lost(how: Reduction, dtype: torch.dtype, num_parts: int, place: int) -> None:
    parts = [torch.ones(20, dtype=dtype) for _ in range(num_parts)]
    parts[place][3], parts[place][18] = math.nan, math.inf
    actual = combined(how, parts)
    assert actual.isnan().nonzero().tolist() == [[3]]
    assert actual[18].item() == (1.0 if how is Reduction.MIN else math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", Reduction, ids=lambda how: how.value)
@pytest.mark.parametrize("num_parts", [2, 5])
def test_nothing_gives_nothing(how: Reduction, dtype: torch.dtype, num_parts: int) -> None:
    assert combined(how, [torch.empty(0, dtype=dtype)] * num_parts, alias=0).shape == (0,)
