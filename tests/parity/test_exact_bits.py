"""Exact mode: the same bits on 1 to 5 processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from exact_recipes import MODELS, WORLDS, Case, all_cases, covering, train_cases
from instep.core.topology import Place
from instep.world.world import World
from ranks import run_ranks

CHOSEN = covering(2)
"""Any two values of two factors meet; test_every_combination has all."""
SPECIAL = [
    (Case("tied", "adamw", 16, (49, 23, 1), bf16=True), 3),
    (Case("conv", "sgd", 12, (61, 24, 1), bf16=True), 2),
    (Case("mlp", "adamw", 12, (50, 32, 2), bf16=True, clip_norm=0.1), 4),
    (Case("buffers", "sgd", 12, (50, 24, 1)), 3),
    (Case("mlp", "langevin", 12, (49, 23, 1)), 3),
    (Case("buffers", "adamw", 4, (48, 32, 2)), 5),
    (Case("lstm", "sgd", 16, (49, 23, 1), clip_norm=0.05), 5),
]


@functools.cache
def alone(cases: tuple[Case, ...]) -> dict[Case, dict[str, Any]]:
    return train_cases(World.join(Place()), list(cases))


@functools.cache
def together(cases: tuple[Case, ...], world_size: int) -> dict[Case, dict[str, Any]]:
    return run_ranks(train_cases, world_size, list(cases), timeout_s=600)[0]


def same_bits(cases: tuple[Case, ...], case: Case, world_size: int) -> None:
    expected, actual = alone(cases)[case], together(cases, world_size)[case]
    assert expected["sha256"] == actual["sha256"]
    assert expected == actual
    assert len(set(expected["losses"])) == 7  # it does train
    assert expected["notices"] == []


def of_world(pairs: list[tuple[Case, int]], world_size: int) -> tuple[Case, ...]:
    return tuple(case for case, size in pairs if size == world_size)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "world_size"), CHOSEN + SPECIAL, ids=str)
def test_the_bits_are_those_of_one_process(case: Case, world_size: int) -> None:
    same_bits(of_world(CHOSEN + SPECIAL, world_size), case, world_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_combination(model: str, world_size: int) -> None:
    cases = tuple(case for case in all_cases() if case.model == model)
    for case in cases:
        same_bits(cases, case, world_size)
