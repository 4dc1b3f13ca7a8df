"""The reducer: sums over ranks, and gradients that are not everywhere, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.parallel.ddp import DdpReducer
from instep.world.world import World
from ranks import run_ranks


def reduced(world: World, dtype: torch.dtype) -> dict[str, Any]:
    rank = world.rank
    everywhere, somewhere, nowhere = (nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 2, 4))
    table = nn.Embedding(5, 2, sparse=True, dtype=dtype)
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    reducer = DdpReducer([everywhere, somewhere, nowhere, table.weight, half], world, num_sums=2)
    for step in range(2):  # the second step must not see the first one's sums
        everywhere.grad = torch.full((3,), rank + 1.0, dtype=dtype)
        somewhere.grad = torch.full((2,), 5.0, dtype=dtype) if rank == 1 else None
        nowhere.grad = None
        table.weight.grad = None
        table(torch.tensor([rank, 4])).sum().backward()
        half.grad = torch.full((2,), 0.5, dtype=torch.bfloat16)
        sums = reducer.reduce((rank + step, 10.0))
    return {
        "sums": sums,
        "everywhere": everywhere.grad.tolist(),
        "somewhere": somewhere.grad.tolist(),
        "nowhere": nowhere.grad,
        "table": table.weight.grad.to_dense().tolist(),
        "half": half.grad.tolist(),
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sums_and_missing_gradients(dtype: torch.dtype, world_size: int) -> None:
    answers = run_ranks(reduced, world_size, dtype)
    counts = [[1.0, 1.0]] * world_size + [[0.0, 0.0]] * (4 - world_size) + [[float(world_size)] * 2]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == {
        "sums": [sum(range(world_size)) + world_size, 10.0 * world_size],
        "everywhere": [sum(range(1, world_size + 1))] * 3,
        "somewhere": [5.0, 5.0],
        "nowhere": None,
        "table": counts,
        "half": [0.5 * world_size] * 2,
    }
