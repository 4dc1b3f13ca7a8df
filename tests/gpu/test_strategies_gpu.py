"""The same answer however a model is spread over processes that share a GPU, over gloo; and fsdp's ways to save memory.

One launch trains all models of a way; each model is a test of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.train.task import Task
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from recipes import Case, Recipe, assert_same_answer, train_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda:0"
MLP = Case("deep", "adamw", clip_norm=0.7)
CONV = Case("conv", "sgd", num_samples=47, batch_size=13, clip_norm=2.4)
TIED = Case("tied", "adamw", num_samples=47, batch_size=13, weighted=True, clip_norm=1.0)
ALL, IN_STAGES = (MLP, CONV, TIED), (MLP, TIED)
WAYS: dict[str, tuple[int, tuple[Case, ...], dict[str, Any]]] = {
    "single": (1, ALL, {"strategy": "single"}),
    "dp@1": (1, ALL, {"strategy": "dp"}),
    "ddp@2": (2, ALL, {"strategy": "ddp"}),
    "fsdp@2": (2, ALL, {"strategy": "fsdp"}),
    "fsdp-offload@2": (2, ALL, {"strategy": "fsdp", "offload": True}),
    "fsdp-meta@2": (2, (MLP, TIED), {"strategy": "fsdp", "meta_init": True}),
    "tensor@2": (2, ALL, {"strategy": "tensor"}),
    "pipeline-gpipe@2": (2, IN_STAGES, {"strategy": "pipeline", "schedule": "gpipe"}),
    "pipeline-1f1b@2": (2, IN_STAGES, {"strategy": "pipeline", "schedule": "1f1b"}),
    "pipeline-interleaved@2": (2, IN_STAGES, {"strategy": "pipeline", "schedule": "interleaved"}),
    "dp2-tp2@4": (4, ALL, {"mesh": "dp=2,tp=2"}),
    "dp2-fsdp2@4": (4, ALL, {"mesh": "dp=2,fsdp=2"}),
    "dp2-pp2@4": (4, IN_STAGES, {"mesh": "dp=2,pp=2"}),
}


def train_way(world: World, cases: tuple[Case, ...], options: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    return train_cases(world, list(cases), steps=8, **options)


@cache
def trained(name: str) -> dict[Case, dict[str, Any]]:
    world_size, cases, options = WAYS[name]
    return run_ranks(train_way, world_size, cases, options, timeout_s=250, device=DEVICE)[0]


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case}") for name in WAYS if name != "single" for case in WAYS[name][1]],
)
def test_the_same_answer(name: str, case: Case) -> None:
    assert_same_answer(case, trained(name)[case], trained("single")[case])


@dataclass(kw_only=True)
class Steady(Recipe):
    """Has no schedule, so that more steps may follow."""

    scheduler = Task.scheduler


def train_in(world: World, folder: str, steps: int, options: dict[str, Any]) -> tuple[float, str]:
    task = Steady(model_name="tied", optimizer_name="adamw", dtype=torch.float32, num_samples=47, weighted=True)
    spec = TrainSpec(steps=steps, batch_size=13, seed=5, threads=1, save_every="never", **options)
    with process_settings(spec, world.world_size):
        result = worker_main(world, task, spec, RunDirectory(Path(folder)))
    return result.loss, result.weights_sha256


@pytest.mark.parametrize(
    ("precision", "more", "near"),
    [
        ("bf16", {}, 0.01),
        ("fp16", {}, 0.01),
        ("bf16", {"offload": True}, 0.01),
        ("fp16", {"offload": True}, 0.01),
        ("bf16", {"narrow_gather": True}, 0.02),
    ],
    ids=str,
)
def test_half_the_precision_under_fsdp(tmp_path: Path, precision: str, more: dict[str, Any], near: float) -> None:
    # Against ddp: which sums overflow in fp16, and so which first steps are skipped, depends on how a batch is cut.
    options = {"precision": precision, "compile": False}
    copies = run_ranks(train_in, 2, str(tmp_path / "ddp"), 12, {**options, "strategy": "ddp"}, device=DEVICE)
    shards = run_ranks(train_in, 2, str(tmp_path / "fsdp"), 12, {**options, "strategy": "fsdp", **more}, device=DEVICE)
    assert shards[0][0] == pytest.approx(copies[0][0], rel=near)


def test_a_run_goes_on_under_other_strategies(tmp_path: Path) -> None:
    fp32 = {"precision": "fp32", "compile": False}
    alone = run_ranks(train_in, 1, str(tmp_path / "alone"), 10, {**fp32, "strategy": "single"}, device=DEVICE)[0]
    legs = [(2, 2, "ddp"), (2, 4, "fsdp"), (2, 6, "tensor"), (2, 8, "pipeline"), (1, 10, "single")]
    for world_size, steps, strategy in legs:
        told = run_ranks(
            train_in, world_size, str(tmp_path / "legs"), steps, {**fp32, "strategy": strategy}, device=DEVICE
        )
    assert told[0][0] == pytest.approx(alone[0], rel=1e-4)


def test_the_same_bits_under_fsdp_in_exact_mode(tmp_path: Path) -> None:
    options = {"precision": "fp32", "compile": False, "exact": True}
    alone = run_ranks(train_in, 1, str(tmp_path / "alone"), 6, {**options, "strategy": "single"}, device=DEVICE)[0]
    for world_size in (2, 3):
        folder = str(tmp_path / f"fsdp-{world_size}")
        spread = run_ranks(train_in, world_size, folder, 6, {**options, "strategy": "fsdp"}, device=DEVICE)
        assert {told[1] for told in spread} == {alone[1]}
