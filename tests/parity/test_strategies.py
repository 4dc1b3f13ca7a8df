"""The same answer however a model is spread: losses of every step, gradients' norms, metrics and final weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from ranks import run_ranks
from recipes import Case, train_case

STEPS = 30
MLP = Case("deep", "adamw", clip_norm=0.7)
CONV = Case("conv", "sgd", num_samples=47, batch_size=13, clip_norm=2.4)
TIED = Case("tied", "adamw", num_samples=47, batch_size=13, weighted=True, clip_norm=1.0)


@dataclass(frozen=True)
class Way:
    """One way to spread a model."""

    options: tuple[tuple[str, Any], ...]
    worlds: tuple[int, ...]
    cases: tuple[Case, ...] = (MLP, CONV, TIED)

    def __str__(self) -> str:
        return "-".join(str(value) for _, value in self.options)


WAYS = [
    Way((("strategy", "dp"),), (1,)),
    Way((("strategy", "ddp"),), (2, 4)),
    Way((("strategy", "fsdp"),), (2, 4)),
    Way((("mesh", "dp=2,fsdp=2"),), (4,)),
    Way((("strategy", "tensor"),), (2, 4)),
    Way((("mesh", "dp=2,tp=2"),), (4,)),
    Way((("mesh", "fsdp=2,tp=2"),), (4,)),
]


def train_way(world: Any, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    return train_case(world, case, **options)


@cache
def alone(case: Case) -> dict[str, Any]:
    return run_ranks(train_way, 1, case, {"strategy": "single"})[0]


@pytest.mark.parametrize(
    ("way", "world_size", "case"),
    [
        pytest.param(way, world_size, case, id=f"{way}@{world_size}-{case}")
        for way in WAYS
        for world_size in way.worlds
        for case in way.cases
    ],
)
def test_the_same_answer(way: Way, world_size: int, case: Case) -> None:
    wanted = alone(case)
    found = run_ranks(train_way, world_size, case, dict(way.options))[0]
    # Float64: what is left are other orders of additions.
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-9, abs=1e-9)
    assert found["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-8, abs=1e-9)
    assert found["lrs"] == wanted["lrs"]
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9, abs=1e-9)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        assert flat(found["weights"][name]) == pytest.approx(flat(tensor), rel=1e-9, abs=1e-9), name


def flat(nested: Any) -> list[float]:
    if not isinstance(nested, list):
        return [math.nan if nested is None else nested]
    return [number for item in nested for number in flat(item)]
