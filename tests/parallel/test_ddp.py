"""The reducer: sums over ranks, and gradients that are not everywhere, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from instep.parallel.ddp import DdpReducer
from instep.parallel.strategy import StepSums
from instep.world.lane import engine
from instep.world.world import World
from ranks import run_ranks


def reduced(world: World, dtype: torch.dtype) -> dict[str, Any]:
    rank = world.rank
    everywhere, somewhere, nowhere = (nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 2, 4))
    table = nn.Embedding(5, 2, sparse=True, dtype=dtype)
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    reducer = DdpReducer([everywhere, somewhere, nowhere, table.weight, half], world)
    for step in range(2):  # the second step must not see the first one's sums
        everywhere.grad = torch.full((3,), rank + 1.0, dtype=dtype)
        somewhere.grad = torch.full((2,), 5.0, dtype=dtype) if rank == 1 else None
        nowhere.grad = None
        table.weight.grad = None
        table(torch.tensor([rank, 4])).sum().backward()
        half.grad = torch.full((2,), 0.5, dtype=torch.bfloat16)
        sums = list(reducer.reduce(StepSums(rank + step, 10.0))[:2])
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


def mixed(world: World, kind: str) -> tuple[list[Any], bool]:
    """Reduce gradients, of which rank 0's are all of the plain kind; tell whether a plain one stays where it lies."""
    rank = world.rank
    first, second = nn.Parameter(torch.zeros(40, 1000)), nn.Parameter(torch.zeros(40, 1000))
    reducer = DdpReducer([first, second], world)
    result, stayed = [], False
    for step in range(3):
        numbers = torch.arange(40_000.0).view(40, 1000) * (rank + 1) + step
        first.grad, second.grad = numbers.clone(), numbers.clone()
        if rank and step != 1:
            match kind:
                case "one gradient of two parameters":
                    second.grad = first.grad
                case "transposed":
                    first.grad = numbers.t().contiguous().t()
                case "with a graph":
                    first.grad = (numbers.clone().requires_grad_() * 1.0).view(40, 1000)
                case "missing":
                    second.grad = None
                case "in one another's memory":
                    row = torch.arange(40_005.0) * 2 + step
                    first.grad, second.grad = row[:-5].view(40, 1000), row[5:].view(40, 1000)
                case "of another dtype":
                    first.grad_dtype = None
                    first.grad = numbers.double()
                case "without memory of its own":
                    first.grad = AsyncCollectiveTensor(numbers)
        before = second.grad
        sums = [reducer.reduce(StepSums(1.0)).loss]
        stayed = second.grad is before
        result += [sums, first.grad.detach().clone(), second.grad.clone()]
    return result, stayed


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "one gradient of two parameters", "transposed", "with a graph", "missing"),
        *("in one another's memory", "of another dtype", "without memory of its own"),
    ],
)
def test_gradients_that_cannot_be_added_up_where_they_lie(kind: str) -> None:
    (result, stayed), (other, _) = run_ranks(mixed, 2, kind)
    assert stayed == (engine.load() is not None)
    for step in range(3):
        sums, first, second = result[3 * step : 3 * step + 3]
        assert sums == other[3 * step] == [2.0]
        numbers = torch.arange(40_000.0).view(40, 1000)
        once, both = numbers + step, numbers * 3 + 2 * step
        assert torch.equal(first, both)
        odd = {"missing": once, "in one another's memory": both + 10} if step != 1 else {}
        assert torch.equal(second, odd.get(kind, both))
        assert torch.equal(first, other[3 * step + 1])
        assert torch.equal(second, other[3 * step + 2])
