"""The same answer however a model is spread: losses of every step, gradients' norms, metrics and final weights.

One launch trains all models of a way; each model is a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

from ranks import run_ranks
from recipes import Case, assert_same_answer, train_cases

STEPS = 8
MLP = Case("deep", "adamw", clip_norm=0.7)
CONV = Case("conv", "sgd", num_samples=47, batch_size=13, clip_norm=2.4)
TIED = Case("tied", "adamw", num_samples=47, batch_size=13, weighted=True, clip_norm=1.0)
TIED_32 = Case("tied", "sgd", dtype="float32", num_samples=47, batch_size=13, clip_norm=1.0)
CASES = (MLP, CONV, TIED, TIED_32)
IN_STAGES = (MLP, TIED, TIED_32)
"""Without BatchNorm, whose statistics cover a microbatch: tests/parallel/test_pipeline_parity.py has that."""


@dataclass(frozen=True)
class Way:
    """One way to spread a model."""

    world_size: int
    cases: tuple[Case, ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "-".join(str(value) for _, value in self.options) + f"@{self.world_size}"


def way(world_size: int, cases: tuple[Case, ...] = CASES, **options: Any) -> Way:
    return Way(world_size, cases, tuple(options.items()))


WAYS = [
    way(1, strategy="dp"),
    way(2, strategy="ddp"),
    way(4, strategy="fsdp"),
    way(4, mesh="dp=2,fsdp=2"),
    way(2, strategy="fsdp", reshard=False),
]
OF_ANOTHER_SIZE = [way(4, strategy="ddp"), way(2, strategy="fsdp")]
IN_PARALLEL_TOO = [
    *(way(n, strategy="tensor") for n in (2, 4)),
    *(way(n, IN_STAGES, strategy="pipeline", schedule=s) for s in ("gpipe", "1f1b", "interleaved") for n in (2, 4)),
    *(way(4, mesh=mesh) for mesh in ("dp=2,tp=2", "fsdp=2,tp=2")),
    way(4, IN_STAGES, mesh="dp=2,pp=2"),
]
"""Meshes and schedules of tests/parallel/test_tensor.py and test_pipeline_parity.py; here with other models."""
COMPILED = [
    *(way(n, strategy="fsdp", compile=True) for n in (2, 4)),
    *(way(2, IN_STAGES, strategy="pipeline", schedule=s, compile=True) for s in ("gpipe", "1f1b", "interleaved")),
    way(4, mesh="dp=2,fsdp=2", compile=True),
    way(4, IN_STAGES, mesh="dp=2,pp=2", compile=True),
]
"""By a compiler that splits and traces, and runs the graphs as they are; as in tests/parallel/test_regional.py."""
_torch_compile = torch.compile


def train_way(world: Any, cases: tuple[Case, ...], options: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    torch.compile = partial(_torch_compile, backend="aot_eager_decomp_partition")
    return train_cases(world, list(cases), steps=STEPS, **options)


@cache
def trained(chosen: Way) -> dict[Case, dict[str, Any]]:
    results: dict[Case, dict[str, Any]] = run_ranks(
        train_way, chosen.world_size, chosen.cases, dict(chosen.options), timeout_s=150
    )[0]
    return results


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("chosen", "case"),
    [
        pytest.param(each, case, id=f"{each}-{case}", marks=marks)
        for ways, marks in ((WAYS, ()), ([*OF_ANOTHER_SIZE, *IN_PARALLEL_TOO, *COMPILED], pytest.mark.slow))
        for each in ways
        for case in each.cases
    ],
)
def test_the_same_answer(chosen: Way, case: Case) -> None:
    assert_same_answer(case, trained(chosen)[case], trained(way(1, strategy="single"))[case])
