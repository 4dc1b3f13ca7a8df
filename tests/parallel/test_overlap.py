"""Gradients that travel while backward runs: the sums are those of a reduction after backward, whatever happens."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instep.core.tree import run_of
from instep.parallel import buckets, overlap
from instep.parallel.batch_context import BatchContext
from instep.parallel.ddp import DdpReducer
from instep.parallel.exact import ExactReducer
from instep.parallel.strategy import StepSums
from instep.world.float_codec import load_codec
from instep.world.world import World
from ranks import run_ranks

NUM_STEPS = 5
ODD_STEP = 3
"""Counted from 0; the steps before show the order, and overlap."""


class Net(nn.Module):
    """Layers of several dtypes and sizes, one that is used twice, one that only some ranks use, one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = self.tied(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if sometimes:
            x = self.sometimes(x)
        return self.narrow(self.tied(x).bfloat16()).float().square().mean()


def run_step(model: Net, rank: int, step: int, kind: str, begin: Callable[[], None] = lambda: None) -> None:
    """Run one rank's part of a step, or what is odd about it; `begin` comes before each backward pass."""
    odd = step == ODD_STEP and rank == 1
    if kind == "no backward pass" and odd:
        return
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    x = x.to(model.tied.weight.device)
    loss = model(x, sometimes=not (kind == "a parameter without gradient" and odd))
    begin()
    loss.backward()
    if (kind == "a second pass" and odd) or kind == "always two passes":
        loss = model(x + 1, sometimes=True)
        begin()
        loss.backward()
    if kind == "always edited":
        model.layers[4].weight.grad.data.clamp_(-0.001, 0.001)
    if kind == "edited" and odd:
        model.layers[4].weight.grad.mul_(3.0)
    if kind == "replaced" and odd:
        model.layers[4].bias.grad = torch.ones_like(model.layers[4].bias)


def clear(model: Net) -> None:
    for p in model.parameters():
        p.grad = None


def overlapped(world: World, kind: str, codes: bool = True) -> dict[str, Any]:
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 128
    overlap._STEPS_BEFORE_CODING, overlap._WORTH_CODING = 2, math.inf if codes else 0.0
    torch.manual_seed(0)
    model = Net().to(world.device)
    reducer = DdpReducer(list(model.parameters()), world, overlaps=True)
    results, begun = [], []
    for step in range(NUM_STEPS):
        clear(model)
        run_step(model, world.rank, step, kind, reducer.begin_last_backward)
        begun.append(reducer._overlap.num_begun if reducer._overlap is not None else 0)
        sums = reducer.reduce(StepSums(loss=float(world.rank + step), weight=2.0))
        results.append(
            (sums.loss, sums.weight, [None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        )
        assert world.broadcast_object("others may come between") == "others may come between"
    is_coded = reducer._channel is not None and reducer._channel.is_coded
    return {"results": results, "begun": begun, "num_buckets": len(reducer._buckets), "is_coded": is_coded}


def expected(world_size: int, kind: str, device: str) -> list[Any]:
    """Return the same sums, computed in one process in the order of the ranks."""
    results = []
    for step in range(NUM_STEPS):
        totals: list[torch.Tensor | None] = []
        for rank in range(world_size):
            torch.manual_seed(0)
            model = Net().to(device)
            run_step(model, rank, step, kind)
            grads = [p.grad for p in model.parameters()]
            totals = grads if not totals else [_add(one, other) for one, other in zip(totals, grads, strict=True)]
        loss = float(sum(rank + step for rank in range(world_size)))
        rounded = [
            None if total is None else total.to(p.dtype) for total, p in zip(totals, model.parameters(), strict=True)
        ]
        results.append((loss, 2.0 * world_size, [None if total is None else total.tolist() for total in rounded]))
    return results


def _add(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    wide = torch.float32 if one.dtype == torch.bfloat16 else one.dtype
    return one.to(wide) + other.to(wide)


KINDS = ["plain", "no backward pass", "a parameter without gradient", "a second pass", "edited", "replaced"]
NEVER = ["always two passes", "always edited"]
"""These do not overlap at all."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, *NEVER])
def test_the_sums_are_the_same(kind: str, world_size: int) -> None:
    answers = run_ranks(overlapped, world_size, kind, apart=True)
    check_overlapped(answers, kind)
    assert all(answer["is_coded"] == (load_codec() is not None and kind not in NEVER) for answer in answers)


def test_what_is_not_coded_has_the_same_sums() -> None:
    answers = run_ranks(overlapped, 3, "plain", False, apart=True)
    check_overlapped(answers, "plain")
    assert not any(answer["is_coded"] for answer in answers)


def check_overlapped(answers: list[dict[str, Any]], kind: str, device: str = "cpu") -> None:
    wanted = expected(len(answers), kind, device)
    for answer in answers:
        assert answer["results"] == wanted
        if kind in NEVER:
            assert not any(answer["begun"])
            continue
        assert answer["num_buckets"] > 5
        assert answer["begun"][0] == 0  # the order is not known yet
        assert all(num > 2 for num in answer["begun"][1:ODD_STEP])
        # After anything odd, the next step at least reduces after backward.
        assert (answer["begun"][-1] > 2) == (kind == "plain")


def replaced(world: World) -> list[float]:
    """Reduce with a new reducer now and then, also while the old one's buckets are on their way."""
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 128
    torch.manual_seed(0)
    model = Net()
    held = list(model.layers.parameters())
    reducer, results = DdpReducer(held, world, overlaps=True), []
    for step in range(8):
        clear(model)
        run_step(model, world.rank, step, "plain", reducer.begin_last_backward)
        reducer.begin_reduce()
        if step in (2, 4):
            held += list(model.tied.parameters()) if step == 2 else [*model.sometimes.parameters()]
            reducer.close()
            reducer = DdpReducer(held, world, overlaps=True)
            gc.collect()
        reducer.reduce(StepSums())
        results.append(sum(float(p.grad.sum()) for p in held))
    return results


def test_a_reducer_is_replaced_while_gradients_travel() -> None:
    answers = run_ranks(replaced, 3, apart=True)
    assert all(answer == answers[0] for answer in answers)


def exact_steps(world: World, num_shards: int, num_passes: int, num_backwards: int, overlaps: bool) -> list[Any]:
    """Return the gradients of exact steps, and how many buckets were begun in backward."""
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 128
    torch.manual_seed(0)
    model, context = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))), BatchContext(torch.device("cpu"), 0)
    context.num_shards = num_shards
    reducer = ExactReducer(list(model.parameters()), world, context, overlaps=overlaps)
    first, last = run_of(world.rank, world.world_size, num_shards)
    results, begun = [], 0
    for _ in range(4):
        for p in model.parameters():
            p.grad = None
        reducer.forget()
        for number in range(num_passes):
            for shard in range(first, last):
                context.shard = shard
                for _ in range(num_backwards):
                    loss = model(torch.full((2, 6), 0.3 + shard + 10 * number)).square().sum()
                    if shard == last - 1:
                        reducer.begin_last_backward()
                    loss.backward()
                begun = max(begun, reducer._overlap.num_begun if reducer._overlap is not None else 0)
                reducer.end_shard(StepSums(loss=1.0))
        sums = reducer.reduce(StepSums())
        results.append((sums.loss, [p.grad.tolist() for p in model.parameters()]))
    assert (begun > 2) == (overlaps and num_backwards == 1 and last > first)
    return results


@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 4), (3, 7), (3, 2)])
@pytest.mark.parametrize(("num_passes", "num_backwards"), [(1, 1), (2, 1), (1, 2)])
def test_exact_sums_are_the_same(world_size: int, num_shards: int, num_passes: int, num_backwards: int) -> None:
    shape = num_shards, num_passes, num_backwards
    answers = run_ranks(exact_steps, world_size, *shape, True, apart=True)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == run_ranks(exact_steps, world_size, *shape, False, apart=True)[0]


def many_channels(world: World) -> list[float]:
    for _ in range(300):
        channel = world.open_channel()
    empty, full = torch.zeros(0), torch.ones(5)
    assert channel is not None
    channel.is_coded = channel.codec is not None
    for flat in (empty, full):
        channel.prepare(flat).begin_sum(flat).wait()
    return full.tolist()


def test_many_channels_and_nothing_to_send() -> None:
    assert run_ranks(many_channels, 2, apart=True) == [[2.0] * 5] * 2
