"""The same answer between nodes, where gradients travel in buckets while backward runs; in exact mode the same bits."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from test_exact_bits import CHOSEN, SPECIAL
from test_parity import TOLERANCE, reference

import exact_recipes
import recipes
from instep.core.topology import Place
from instep.parallel import buckets, overlap
from instep.world.world import World
from ranks import run_ranks

EXACT = [(case, size) for case, size in CHOSEN + SPECIAL if size in (2, 3, 4)]


def in_small_buckets(world: World, module: str, cases: list[Any]) -> dict[Any, dict[str, Any]]:
    buckets._BUCKET_S, buckets._LEAST_BYTES = 0.0, 512
    overlap._STEPS_BEFORE_CODING, overlap._WORTH_CODING = 2, math.inf
    begun: list[int] = []
    flush = overlap.Overlap.flush

    def counted_flush(self: overlap.Overlap) -> None:
        begun.append(self.num_begun)
        flush(self)

    overlap.Overlap.flush = counted_flush  # type: ignore[method-assign] # a process of its own, which ends with this
    assert world.overlaps == (world.world_size > 1)
    results = {"recipes": recipes, "exact_recipes": exact_recipes}[module].train_cases(world, cases)
    assert max(begun) > 1  # buckets that were on their way when backward ended
    return results


@functools.cache
def apart(world_size: int) -> dict[recipes.Case, dict[str, Any]]:
    return run_ranks(in_small_buckets, world_size, "recipes", recipes.CASES, apart=True, timeout_s=200)[0]


@functools.cache
def exact_apart(world_size: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Train the exact cases of a world size on one process, and apart."""
    cases = [case for case, size in EXACT if size == world_size]
    alone = exact_recipes.train_cases(World.join(Place()), cases)
    return alone, run_ranks(in_small_buckets, world_size, "exact_recipes", cases, apart=True, timeout_s=200)[0]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", recipes.CASES, ids=str)
def test_the_same_answer(case: recipes.Case, world_size: int) -> None:
    expected, actual = reference()[case], apart(world_size)[case]
    assert actual["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[case.dtype], abs=0)
    assert actual["metrics"]["accuracy"] == expected["metrics"]["accuracy"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("case", "world_size"), EXACT, ids=str)
def test_the_same_bits(case: exact_recipes.Case, world_size: int) -> None:
    alone, together = exact_apart(world_size)
    assert together[case] == alone[case]


def test_nodes_that_are_one_machine() -> None:
    """Two launchers of one machine, each with a rank: shared memory, in which gradients are added up in place."""
    case = recipes.CASES[0]
    both = run_ranks(recipes.train_cases, 2, [case], apart=True, comm="auto")
    for actual in both:
        assert actual[case]["losses"] == pytest.approx(reference_of(case)["losses"], rel=TOLERANCE[case.dtype], abs=0)


def reference_of(case: recipes.Case) -> dict[str, Any]:
    return recipes.train_cases(World.join(Place()), [case])[case]
