"""The same answer on a GPU: one process, and two that share it over gloo."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import RowDropout
from instep.train.worker import worker_main
from instep.world.world import World, backend_for
from ranks import run_ranks
from recipes import CASES, Case, train_cases
from tasks import Small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@functools.cache
def trained(world_size: int) -> list[dict[Case, dict[str, Any]]]:
    return run_ranks(train_cases, world_size, CASES, timeout_s=250, device=DEVICE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_on_one_gpu_equal_one(case: Case) -> None:
    one, two = trained(1)[0][case], trained(2)
    assert two[0][case]["losses"] == pytest.approx(one["losses"], rel=TOLERANCE[case.dtype], abs=0)
    assert two[0][case]["metrics"]["accuracy"] == one["metrics"]["accuracy"]
    assert two[0][case]["sha256"] == two[1][case]["sha256"]


def test_ranks_that_share_a_gpu_use_gloo() -> None:
    count = torch.cuda.device_count()
    assert backend_for(Place(world_size=count + 1, local_world_size=count + 1, device=DEVICE)) == "gloo"
    assert backend_for(Place(world_size=count, local_world_size=count, device=DEVICE)) == "nccl"


def test_masks_are_those_of_the_cpu() -> None:
    masks = []
    for device in (torch.device("cpu"), torch.device(DEVICE)):
        context = BatchContext(device, seed=3)
        layer = RowDropout(0.3, context, 1)
        context.begin_step(4)
        context.begin_part(8, 16, replicated=False)
        masks.append(layer(torch.ones(16, 33, device=device)).cpu())
    assert torch.equal(*masks)


def train(world: World, run_dir: str, steps: int) -> dict[str, Any]:
    spec = TrainSpec(steps=steps, batch_size=10, save_every="3", threads=1, compile=False)
    return worker_main(world, Small(), spec, RunDirectory(Path(run_dir))).to_json()


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(train, 1, str(tmp_path / "whole"), 9, device=DEVICE)[0]
    run_ranks(train, 1, str(tmp_path / "parts"), 6, device=DEVICE)
    parts = run_ranks(train, 2, str(tmp_path / "parts"), 9, device=DEVICE)[0]
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-9)
    again = run_ranks(train, 1, str(tmp_path / "again"), 9, device=DEVICE)[0]
    assert again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by what the compiler imports
def test_row_dropout_compiles_without_compiling_anew_each_step() -> None:
    context = BatchContext(torch.device(DEVICE), seed=3)
    layer = RowDropout(0.1, context, 1)
    compiled = torch.compile(layer)
    x = torch.ones(64, 512, device=DEVICE)
    for step in range(4):
        context.begin_step(step)
        context.begin_part(0, 64, replicated=False)
        expected = layer(x)
        context.begin_part(0, 64, replicated=False)
        with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
            assert torch.equal(compiled(x), expected)
