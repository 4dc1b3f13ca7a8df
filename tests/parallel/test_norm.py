"""Synchronised BatchNorm: outputs, gradients and running statistics of one process over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.parallel.batch_context import BatchContext
from instep.parallel.norm import sync_batch_norm
from instep.world.world import World
from ranks import run_ranks

ROWS = 7


def made(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "1d": (ROWS, 5),
        "1d-long": (ROWS, 5, 3),
        "2d": (ROWS, 5, 2, 3),
        "the user's SyncBatchNorm": (ROWS, 5, 2, 3),
        "plain": (ROWS, 5),
        "cumulative": (ROWS, 5),
    }
    options = {"plain": {"affine": False, "track_running_stats": False}, "cumulative": {"momentum": None}}.get(kind, {})
    module = (nn.BatchNorm2d if len(shapes[kind]) == 4 else nn.BatchNorm1d)(5, **options).double()
    if module.affine:
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return module, torch.randn(shapes[kind], dtype=torch.float64) * 3 + 100


def through(module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two passes, so that running statistics build on each other; the gradients of the second."""
    for _ in range(2):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        ((y * weights) ** 2).sum().backward()
    result = {"y": y.detach(), "x": leaf.grad}
    result |= {f"grad {name}": p.grad for name, p in module.named_parameters()}
    return result | {f"buffer {name}": b.clone() for name, b in module.named_buffers()}


def rank_part(world: World, kind: str, replicated: bool) -> dict[str, torch.Tensor]:
    module, x = made(kind)
    weights = torch.linspace(0.5, 2, x.numel(), dtype=torch.float64).view_as(x)
    context = BatchContext(torch.device("cpu"), 0)
    if kind == "the user's SyncBatchNorm":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert sync_batch_norm(module, world, context) == 1
    low, high = (0, ROWS) if replicated else (ROWS * world.rank // 3, ROWS * (world.rank + 1) // 3)
    context.begin_part(low, high - low, replicated)
    return through(module, x[low:high], weights[low:high])


@pytest.mark.parametrize("kind", ["1d", "1d-long", "2d", "plain", "cumulative", "the user's SyncBatchNorm"])
def test_three_uneven_shares_equal_the_whole(kind: str) -> None:
    module, x = made(kind)
    weights = torch.linspace(0.5, 2, x.numel(), dtype=torch.float64).view_as(x)
    expected = through(module, x, weights)
    ranks = run_ranks(rank_part, 3, kind, False)
    for name, value in expected.items():
        if name in ("y", "x"):
            result: Any = torch.cat([rank[name] for rank in ranks])
        elif name.startswith("grad"):
            result = sum(rank[name] for rank in ranks)
        else:
            result = ranks[0][name]
            assert all(torch.equal(rank[name], result) for rank in ranks)
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-9)


def test_a_replicated_part_is_not_exchanged() -> None:
    module, x = made("2d")
    weights = torch.linspace(0.5, 2, x.numel(), dtype=torch.float64).view_as(x)
    expected = through(module, x, weights)
    for rank in run_ranks(rank_part, 3, "2d", True):
        for name, value in expected.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-9, atol=1e-9)
