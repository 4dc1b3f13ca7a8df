"""Exact mode on a GPU: the same bits from one process and from several that share it over gloo, and every time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from exact_recipes import MODELS, Case, train_cases
from ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = (49, 23, 1)
EAGER = [Case(model, "adamw-fused", 12, SHAPE, bf16=bf16) for model in MODELS for bf16 in (False, True)]
CLIPPED = [Case("conv", "sgd", 16, (50, 32, 2), clip_norm=0.1), Case("buffers", "adamw", 12, (50, 24, 1))]
COMPILED = [
    Case(model, "adamw", 4, SHAPE, bf16=bf16, compiled=True) for model in ("mlp", "tied") for bf16 in (False, True)
]


@functools.cache
def trained(cases: tuple[Case, ...], world_size: int, again: int = 0) -> dict[Case, dict[str, Any]]:
    return run_ranks(train_cases, world_size, list(cases), timeout_s=500, device="cuda:0")[0]


def show(case: Case, actual: dict[str, Any], world_size: int) -> None:
    print(f"{case!s:48} {world_size} process(es): {actual['sha256'][:16]}, loss {actual['losses'][-1]!r}")


def same_bits(cases: list[Case], case: Case, world_size: int, again: int = 0) -> None:
    expected = trained(tuple(cases), 1)[case]
    actual = trained(tuple(cases), world_size, again)[case]
    show(case, expected, 1)
    show(case, actual, world_size)
    assert expected == actual
    assert len(set(expected["losses"])) == 7  # it does train


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", EAGER + CLIPPED, ids=str)
def test_the_bits_are_those_of_one_process(case: Case, world_size: int) -> None:
    same_bits(EAGER + CLIPPED, case, world_size)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", EAGER + CLIPPED, ids=str)
def test_one_process_gives_them_every_time(case: Case) -> None:
    same_bits(EAGER + CLIPPED, case, 1, again=1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_two_processes_give_the_bits_of_one(case: Case) -> None:
    same_bits(COMPILED, case, 2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_one_process_gives_them_every_time(case: Case) -> None:
    same_bits(COMPILED, case, 1, again=1)
