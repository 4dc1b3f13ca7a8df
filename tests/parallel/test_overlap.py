"""Gradients that travel while backward runs: the sums are those of a reduction after backward, whatever happens."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from instep.core.tree import run_of
from instep.parallel import buckets, overlap
from instep.parallel.batch_context import BatchContext
from instep.parallel.ddp import DdpReducer
from instep.parallel.exact import ExactReducer
from instep.parallel.strategy import StepSums
from instep.world.float_codec import load_codec
from instep.world.group import SharedGroup
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


def run_step(
    model: Net,
    rank: int,
    step: int,
    kind: str,
    begin: Callable[[], None] = lambda: None,
    again: Callable[[], None] = lambda: None,
) -> None:
    """Run one rank's part of a step, or what is odd about it; `begin` comes before each backward pass."""
    odd = step == ODD_STEP and rank == 1
    if kind == "no backward pass" and odd:
        return
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    x = x.to(model.tied.weight.device)
    loss = model(x, sometimes=not (kind == "a parameter without gradient" and odd))
    begin()
    loss.backward()
    if kind == "begun again" and odd:  # as after a trial of compiled code that has failed in backward
        clear(model)
        again()
        loss = model(x, sometimes=True)
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
    buckets._BUCKET_S, buckets._LEAST_BYTES, buckets.DEFAULT_BYTES = 0.0, 128, 128
    overlap._STEPS_BEFORE_CODING, overlap._WORTH_CODING = 2, math.inf if codes else 0.0
    torch.manual_seed(0)
    model = Net().to(world.device)
    reducer = DdpReducer(list(model.parameters()), world, overlaps=True)
    results, begun = [], []
    for step in range(NUM_STEPS):
        clear(model)
        run_step(model, world.rank, step, kind, reducer.begin_last_backward, reducer.forget)
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


KINDS = [
    "plain",
    "no backward pass",
    "a parameter without gradient",
    "a second pass",
    "begun again",
    "edited",
    "replaced",
]
NEVER = ["always two passes", "always edited"]
"""These do not overlap at all."""


def all_kinds(world: World) -> dict[str, dict[str, Any]]:
    return {kind: overlapped(world, kind) for kind in [*KINDS, *NEVER]}


@functools.cache
def answers_of_all_kinds(world_size: int) -> list[dict[str, Any]]:
    """One launch serves all kinds."""
    return run_ranks(all_kinds, world_size, apart=True)


def test_a_parameter_without_gradient_holds_up_its_own_bucket_only() -> None:
    """Where the cut follows from the parameters alone, as on GPUs."""
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(6)]
    fixed = buckets.plan_buckets(parameters, range(6)[::-1], 64)
    assert fixed == [[5], [4, 3], [2, 1], [0]]
    assert buckets.in_order_of_readiness(fixed, [4, 3, 0, 1, 2]) == [[4, 3], [2, 1], [5], [0]]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, *NEVER])
def test_the_sums_are_the_same(kind: str, world_size: int) -> None:
    answers = [by_kind[kind] for by_kind in answers_of_all_kinds(world_size)]
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


def exact_steps(world: World, num_shards: int, num_passes: int, num_backwards: int | str, overlaps: bool) -> list[Any]:
    """Return the gradients of exact steps, and how many buckets were begun in backward.

    `num_backwards`: of each shard; "odd": two of one rank's last shard, in one step that is not the first.
    """
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 128
    torch.manual_seed(0)
    model, context = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))), BatchContext(torch.device("cpu"), 0)
    context.num_shards = num_shards
    reducer = ExactReducer(list(model.parameters()), world, context, overlaps=overlaps)
    first, last = run_of(world.rank, world.world_size, num_shards)
    results, begun = [], 0
    for step in range(4):
        for p in model.parameters():
            p.grad = None
        reducer.forget()
        for number in range(num_passes):
            for shard in range(first, last):
                context.shard = shard
                is_odd = num_backwards == "odd" and (step, shard) == (2, run_of(0, world.world_size, num_shards)[1] - 1)
                for _ in range(num_backwards if num_backwards != "odd" else 1 + is_odd):
                    loss = model(torch.full((2, 6), 0.3 + shard + 10 * number)).square().sum()
                    if shard == last - 1:
                        reducer.begin_last_backward()
                    loss.backward()
                begun = max(begun, reducer._overlap.num_begun if reducer._overlap is not None else 0)
                reducer.end_shard(StepSums(loss=1.0))
        sums = reducer.reduce(StepSums())
        results.append((sums.loss, [p.grad.tolist() for p in model.parameters()]))
    assert (begun > 2) == (overlaps and num_backwards != 2 and last > first)
    return results


EXACT = [(1, 1), (2, 1), (1, 2), (1, "odd"), (2, "odd")]
"""Passes over the shards, and backward passes of each."""


def all_exact_steps(world: World, num_shards: int) -> dict[Any, list[Any]]:
    return {
        (*shape, overlaps): exact_steps(world, num_shards, *shape, overlaps)
        for shape in EXACT
        for overlaps in (True, False)
    }


@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 4), (3, 7), (3, 2)])
def test_exact_sums_are_the_same(world_size: int, num_shards: int) -> None:
    answers = run_ranks(all_exact_steps, world_size, num_shards, apart=True)
    assert all(answer == answers[0] for answer in answers)
    for shape in EXACT:
        assert answers[0][*shape, True] == answers[0][*shape, False], shape


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


def several_ranks_on_each_node(world: World) -> tuple[int, list[str]]:
    """Return the hashes of sums of the same gradients, step by step; each of two nodes has three ranks."""
    buckets.DEFAULT_BYTES = 16_000  # the sizes that the sums of this model depend on
    node = "aaabbb"[world.rank]
    store = dist.PrefixStore("nodes", _get_default_store())
    group = SharedGroup(store, world.rank, world.world_size, timedelta(seconds=20), label=node)
    nodes = World(replace(world.place, local_world_size=3), "instep", group)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(8)))
    reducer = DdpReducer(list(model.parameters()), nodes, overlaps=True)
    x = torch.randn(4, 60, generator=torch.Generator().manual_seed(world.rank))
    hashes = []
    for _ in range(3):
        for p in model.parameters():
            p.grad = None
        loss = model(x).square().mean()
        reducer.begin_last_backward()
        loss.backward()
        reducer.reduce(StepSums(loss=1.0))
        content = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
        hashes.append(hashlib.sha256(content).hexdigest())
    assert nodes.overlaps
    assert not nodes.has_channels
    group.shutdown()
    return len(reducer._buckets), hashes


def test_a_restarted_run_adds_in_the_same_order() -> None:
    """The first step after a start, which does not overlap, is added up as the ones that do."""
    for num_buckets, hashes in run_ranks(several_ranks_on_each_node, 6):
        assert num_buckets > 3
        assert len(set(hashes)) == 1


def test_one_narrow_parameter_does_not_come_before_all_others() -> None:
    narrow, *wide = (
        nn.Parameter(torch.zeros(64, dtype=torch.bfloat16 if number == 0 else torch.float32)) for number in range(5)
    )
    parameters = [narrow, *wide]
    assert buckets.plan_buckets(parameters, [4, 3, 2, 1, 0], 256) == [[4], [3], [2], [0], [1]]


def failing(world: World) -> float:
    """Leave the world with receives posted, and stay alive; return how long the others took to notice."""
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 128
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    reducer = DdpReducer(list(model.parameters()), world, overlaps=True)
    for step in range(4):
        for p in model.parameters():
            p.grad = None
        loss = model(torch.ones(3, 6)).square().sum()
        reducer.begin_last_backward()
        if step == 3 and world.rank == 1:
            world.__exit__(None, None, None)
            time.sleep(6)
            return 0.0
        begun = time.monotonic()
        try:
            loss.backward()
            reducer.reduce(StepSums(loss=1.0))
        except RuntimeError:
            return time.monotonic() - begun
    raise AssertionError("nobody noticed")


def test_who_leaves_is_noticed_at_once() -> None:
    assert run_ranks(failing, 2, apart=True)[0] < 4
