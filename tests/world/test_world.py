"""Every collective, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.core.topology import Place
from instep.world.world import World
from ranks import run_ranks


def speak(world: World) -> dict[str, Any]:
    rank = world.rank
    tensors = [torch.full((3,), rank), torch.full((2, 2), float(rank)), torch.full((), rank, dtype=torch.bool)]
    world.broadcast(tensors)
    total = world.all_reduce(torch.tensor([1.0, rank]))
    world.barrier()
    return {
        "broadcast": [tensor.tolist() for tensor in tensors],
        "sum": total.tolist(),
        "gather": [part.tolist() for part in world.all_gather(torch.tensor([rank]))],
        "broadcast_object": world.broadcast_object({"rank": rank, "text": "größer"} if world.is_main else None),
        "all_gather_object": world.all_gather_object("x" * (rank + 1)),
        "backend": world.backend,
    }


@pytest.mark.parametrize(("comm", "backend"), [("auto", "shared memory"), ("gloo", "gloo")])
def test_collectives_of_three_ranks(comm: str, backend: str) -> None:
    answers = run_ranks(speak, 3, comm=comm)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == {
        "broadcast": [[0, 0, 0], [[0.0, 0.0], [0.0, 0.0]], False],
        "sum": [3.0, 3.0],
        "gather": [[0], [1], [2]],
        "broadcast_object": {"rank": 0, "text": "größer"},
        "all_gather_object": ["x", "xx", "xxx"],
        "backend": backend,
    }


def sums(world: World) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(world.rank)
    sizes = [(1,), (7, 3), (4 * 2**20 + 5,), (0,)]
    parts = [torch.randn(size, generator=generator) for size in sizes]
    parts += [torch.randn(50, generator=generator).to(dtype) for dtype in (torch.float64, torch.bfloat16)]
    parts.append(torch.arange(9) * (world.rank + 1))
    return [world.all_reduce(part) for part in parts]


@pytest.mark.parametrize("comm", ["auto", "shared-memory", "gloo"])
def test_two_ranks_hold_the_same_bits_of_the_sum(comm: str) -> None:
    one, two = run_ranks(sums, 2, comm=comm)
    ranks = [World.join(Place(rank=rank)) for rank in range(2)]
    expected = [a + b for a, b in zip(*map(sums, ranks), strict=True)]
    for ours, theirs, right in zip(one, two, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, right)


def test_a_world_of_one_has_no_process_group() -> None:
    with World.join(Place()) as world:
        assert not torch.distributed.is_initialized()
        answer = speak(world)
    assert answer["sum"] == [1.0, 0.0]
    assert answer["all_gather_object"] == ["x"]
    assert answer["backend"] == "none"


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise KeyError("sample 17")
    world.all_reduce(torch.ones(1))


def test_a_failing_rank_ends_the_others() -> None:
    with pytest.raises(AssertionError, match="sample 17"):
        run_ranks(fail_on_one, 2, timeout_s=20)
