"""Operations that their caller does not wait for: they do not block it, and the order of the calls is kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import group_on
from instep.world.lane.lane import chunk_bytes
from instep.world.world import World
from ranks import run_ranks

CORES = pytest.mark.parametrize("num_cores", [1, 64])
"""With cores to spare a thread does them; without, the caller begins them ([Note: Two ways in])."""


def starts(group: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    more = {"group": group, "async_op": True}
    size = group.size()
    return {
        "all_reduce": lambda t: dist.all_reduce(t, **more),
        "broadcast": lambda t: dist.broadcast(t, 0, **more),
        "all_gather": lambda t: dist.all_gather([torch.empty_like(t) for _ in range(size)], t, **more),
        "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t.new_empty(size * t.numel()), t, **more),
        "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t.new_empty(t.numel() // size), t, **more),
        "barrier": lambda _: dist.barrier(**more),
    }


def go_on(world: World, num_cores: int, numel: int) -> list[str]:
    """Start an operation, and only then let the other rank come to it."""
    group = group_on(num_cores)
    word, done = torch.zeros(1), []
    for name, start in starts(group).items():
        tensor = torch.full((numel,), world.rank + 1.0)
        if world.rank == 0:
            work = start(tensor)
            dist.send(word, 1)
            dist.recv(word, 1)
        else:
            dist.recv(word, 0)
            dist.send(word, 0)
            work = start(tensor)
        work.wait()
        if name == "all_reduce":
            assert tensor.unique().tolist() == [3.0]
        done.append(name)
    return done


@CORES
@pytest.mark.parametrize("numel", [2, 3 * chunk_bytes(2) // 4 + 2])
def test_the_caller_goes_on(num_cores: int, numel: int) -> None:
    for done in run_ranks(go_on, 2, num_cores, numel, timeout_s=30):
        assert len(done) == 6


def mix(world: World, num_cores: int) -> list[str]:
    """Do many operations on a few tensors, some awaited and some not, and the same by plain arithmetic."""
    group, size = group_on(num_cores), world.world_size
    chance, late = random.Random(7), random.Random(world.rank)  # what is done is the same on all ranks, when is not
    sizes = [1, 100, 20000, chunk_bytes(size) // 8 + 1]
    tensors = [torch.full((n,), world.rank, dtype=torch.int64) for n in sizes]
    held = [list(range(size)) for _ in sizes]  # what each rank has in each
    works, wrong = [], []
    for turn in range(150):
        which, kind = chance.randrange(len(sizes)), chance.randrange(5)
        if late.random() < 0.1:
            time.sleep(late.choice([1e-4, 3e-3]))
        tensor, ranks = tensors[which], held[which]
        if kind == 0:
            dist.all_reduce(tensor, group=group)
            held[which] = [sum(ranks)] * size
        elif kind == 1:
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            held[which] = [sum(ranks)] * size
        elif kind == 2:
            root = chance.randrange(size)
            works.append(dist.broadcast(tensor, root, group=group, async_op=True))
            held[which] = [ranks[root]] * size
        elif kind == 3:
            works.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))
            held[which] = [max(ranks)] * size
        else:
            for work in works:
                work.wait()
            works.clear()
            for tensor, ranks in zip(tensors, held, strict=True):
                if not bool((tensor == ranks[world.rank]).all()):
                    wrong.append(f"turn {turn}: {tensor.unique().tolist()} is not {ranks[world.rank]}")
            held = [[turn + rank for rank in range(size)] for _ in sizes]
            for tensor in tensors:
                tensor.fill_(turn + world.rank)
    return wrong


@CORES
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_order_of_the_calls_is_kept(num_cores: int, world_size: int) -> None:
    assert run_ranks(mix, world_size, num_cores) == [[]] * world_size


def speak_when_done(world: World, num_cores: int) -> list[float]:
    """Have a callback of one operation do the next one and wait for it, as DDP's PowerSGD hook does."""
    group = group_on(num_cores)
    answers = []
    for asynchronous in (False, True):
        first, second = torch.ones(1), torch.ones(1)

        def again(_: Any, tensor: torch.Tensor = second, later: bool = asynchronous) -> None:
            if world.rank == 1:
                time.sleep(0.05)
            work = dist.all_reduce(tensor, group=group, async_op=later)
            if work is not None:
                work.wait()

        if world.rank == 1:
            time.sleep(0.05)  # so that rank 0 does not find it there, and its thread has to go on
        dist.all_reduce(first, group=group, async_op=True).get_future().then(again).wait()
        answers += [first.item(), second.item()]
    return answers


@CORES
def test_a_callback_may_speak(num_cores: int) -> None:
    assert run_ranks(speak_when_done, 2, num_cores, timeout_s=15) == [[2.0] * 4] * 2


def overtake(world: World, num_cores: int) -> list[float]:
    """Have what goes to gloo and what does not under way at once."""
    group = group_on(num_cores)
    shared, by_gloo = torch.full((50000,), world.rank + 1.0), torch.full((50000,), world.rank + 1.0)
    for _ in range(50):
        shared.fill_(world.rank + 1.0)
        by_gloo.fill_(world.rank + 1.0)
        works = [
            dist.all_reduce(shared, group=group, async_op=True),
            dist.all_reduce(by_gloo, dist.ReduceOp.PRODUCT, group=group, async_op=True),
        ]
        for work in works:
            work.wait()
    return [*shared.unique().tolist(), *by_gloo.unique().tolist()]


@CORES
def test_gloo_and_the_lane_are_used_side_by_side(num_cores: int) -> None:
    assert run_ranks(overtake, 3, num_cores) == [[6.0, 6.0]] * 3
