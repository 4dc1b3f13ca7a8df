"""The group over several machines, of unequal numbers of ranks: the ranks are told that they are on different ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from collectives import DTYPES, OPS, Case, digest, expected, inputs_of, is_near, run
from instep.world.group import SharedGroup
from instep.world.lane.lane import area_bytes, chunk_bytes
from instep.world.world import World
from ranks import run_ranks

MACHINES = ["aaabb", "abb", "ab", "abab", "aabc", "aaab"]
"""A letter a rank: the machine that it is on."""


@contextlib.contextmanager
def group_over(world: World, machines: str) -> Iterator[SharedGroup]:
    group = SharedGroup(
        dist.PrefixStore(machines, _get_default_store()),
        world.rank,
        world.world_size,
        timedelta(seconds=20),
        label=machines[world.rank],
    )
    try:
        yield group
    finally:
        group.shutdown()


def compare(world: World, machines: str, wanted: list[Case]) -> tuple[list[str], list[str]]:
    """Do all of it; give what was wrong here, and the bits of what must be the same on all ranks."""
    wrong, bits = [], []
    with group_over(world, machines) as group:
        for case in wanted:
            inputs = inputs_of(case, world.world_size)
            actual = run(case, group, inputs[world.rank])
            if not is_near(case, actual, expected(case, inputs, world.rank), inputs, world.rank):
                wrong.append(str(case))
            if not case.scatters:
                bits.append(f"{digest(actual)} {case}")
    return wrong, bits


def check(machines: str, wanted: list[Case]) -> None:
    answers = run_ranks(compare, len(machines), machines, wanted, timeout_s=30)
    assert [wrong for wrong, _ in answers] == [[]] * len(machines)
    assert all(bits == answers[0][1] for _, bits in answers)


def is_for_gloo(case: Case) -> bool:
    """Gloo alone knows no mean of integers."""
    return case.op == "avg" and not case.dtype.is_floating_point


@pytest.mark.parametrize("machines", MACHINES)
def test_all_reduce(machines: str) -> None:
    wanted = [
        Case("all_reduce", numel, op, dtype, stride, asynchronous=numel == 7, seed=numel)
        for op in OPS
        for dtype in DTYPES
        for numel, stride in ((0, "contiguous"), (1, "contiguous"), (7, "every second"), (20000, "transposed"))
    ]
    alone = len(set(machines)) == len(machines)
    check(machines, [case for case in wanted if not (alone and is_for_gloo(case))])


@pytest.mark.parametrize("machines", MACHINES)
def test_all_reduce_around_the_borders_of_chunks(machines: str) -> None:
    chunk = area_bytes(min(map(machines.count, machines))) // 4
    wanted = [Case("all_reduce", numel, seed=numel) for numel in (chunk - 1, chunk, 2 * chunk + 1)]
    wanted.append(Case("all_reduce", 2 * chunk + 1, dtype=torch.bfloat16))
    check(machines, wanted)


def test_machines_whose_chunks_differ() -> None:
    assert area_bytes(1) < area_bytes(2)
    check("aab", [Case("all_reduce", area_bytes(2) // 4, dtype=dtype) for dtype in (torch.float32, torch.float16)])


@pytest.mark.parametrize("machines", MACHINES)
def test_broadcast_from_every_rank(machines: str) -> None:
    wanted = [
        Case("broadcast", numel, dtype=dtype, stride="transposed", asynchronous=asynchronous, seed=root)
        for root in range(len(machines))
        for numel in (0, 1, 5000)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
        for asynchronous in (False, True)
    ]
    wanted.append(Case("broadcast", chunk_bytes(2) // 4 + 1, seed=len(machines) - 1))
    check(machines, wanted)


@pytest.mark.parametrize("machines", ["ab", "aaab", "abab"])
def test_what_goes_to_gloo_between_machines(machines: str) -> None:
    wanted = [
        Case(operation, 1001, op, dtype, seed=3)
        for operation in ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
        for op in OPS
        for dtype in DTYPES
    ]
    check(machines, [case for case in wanted if not is_for_gloo(case)])


@pytest.mark.parametrize(("machines", "operation"), [("ab", "all_reduce"), ("aab", "reduce_scatter")])
def test_gloo_gives_a_mean_of_integers_too(machines: str, operation: str) -> None:
    check(machines, [Case(operation, 5, "avg", dtype) for dtype in (torch.int32, torch.int64)])


def meet(world: World, machines: str) -> list[tuple[float, float]]:
    times = []
    with group_over(world, machines) as group:
        for late in range(world.world_size):
            if world.rank == late:
                time.sleep(0.05)
            came = time.monotonic()
            dist.barrier(group=group)
            times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("machines", ["abb", "aabc", "ababa"])
def test_nobody_leaves_a_barrier_before_all_have_come(machines: str) -> None:
    for times in zip(*run_ranks(meet, len(machines), machines), strict=True):
        assert max(came for came, _ in times) <= min(left for _, left in times)


def describe(world: World, all_machines: list[str]) -> list[tuple[str, str]]:
    answers = []
    for machines in all_machines:
        with group_over(world, machines) as group:
            answers.append((group.describe(), group.refusal))
    return answers


def test_it_says_what_it_speaks_over() -> None:
    answers = run_ranks(describe, 4, ["aaaa", "abab", "aabc", "abbb", "abcd"])
    assert (
        answers
        == [
            [
                ("shared memory", ""),
                ("shared memory and gloo between 2 nodes", ""),
                ("shared memory and gloo between 3 nodes", ""),
                ("shared memory and gloo between 2 nodes", ""),
                ("gloo", "no two ranks share a node"),
            ]
        ]
        * 4
    )
