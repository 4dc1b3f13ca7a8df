"""Adding up in a way of the caller's: every rank gets what one process would, slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from instep.world.world import _ORDERED_REDUCE_ELEMENTS, World
from ranks import run_ranks

SIZES = (1, 3, 1000, _ORDERED_REDUCE_ELEMENTS - 1, _ORDERED_REDUCE_ELEMENTS + 5)


def rows_of(counts: Sequence[int], numel: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(numel)
    return [[torch.randn(numel, generator=generator).to(dtype) for _ in range(count)] for count in counts]


def odd_sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up so that every other order gives other bits; from the back, and in place."""
    total = rows[-1]
    for row in reversed(rows[:-1]):
        total.mul_(0.7).add_(row)
    return total


def folded(world: World, counts: Sequence[int]) -> list[bool]:
    same = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in SIZES:
            by_rank = rows_of(counts, numel, dtype)
            out = torch.empty(numel, dtype=dtype)
            world.ordered_reduce([row.clone() for row in by_rank[world.rank]], counts, odd_sum, out)
            right = odd_sum([row.clone() for rows in by_rank for row in rows])
            same.append(torch.equal(out, right))
    return same


@pytest.mark.parametrize("comm", ["auto", "gloo"])
@pytest.mark.parametrize("counts", [(1, 1), (0, 2), (3, 2), (1, 1, 1), (2, 3, 2), (0, 1, 0, 2), (1, 2, 2, 2, 1)])
def test_everyone_gets_the_sum_that_one_process_makes(counts: tuple[int, ...], comm: str) -> None:
    for same in run_ranks(folded, len(counts), counts, comm=comm):
        assert same == [True] * 3 * len(SIZES)
