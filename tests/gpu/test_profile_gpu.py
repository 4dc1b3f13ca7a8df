"""A profile of a training on a GPU: kernels, memory, ranges; a snapshot when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.profile.report import write_report
from instep.train.worker import worker_main
from instep.world.device import device_backends
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(world: World, run_dir: str) -> None:
    spec = TrainSpec(batch_size=16, steps=8, profile="3:6", nvtx=True, compile=False, eval_every="never")
    worker_main(world, Small(), spec, RunDirectory(Path(run_dir)))


class Greedy(Small):
    def loss(self, model: object, batch: object) -> object:
        torch.empty(2**48, device="cuda")
        raise AssertionError


def run_out(world: World, run_dir: str) -> str:
    try:
        worker_main(world, Greedy(), TrainSpec(batch_size=16, steps=1, compile=False), RunDirectory(Path(run_dir)))
    except torch.OutOfMemoryError as error:
        return "\n".join(error.__notes__)
    raise AssertionError


def test_kernels_and_memory_of_the_device(tmp_path: Path) -> None:
    run_ranks(train, 1, str(tmp_path), device="cuda:0")
    write_report(tmp_path / "profile", "3:6", device_backends())
    [rank] = json.loads((tmp_path / "profile" / "summary.json").read_text())["ranks"]
    assert rank["device"] == "cuda"
    assert rank["kernels"]
    assert 0 < rank["device_busy_s"] < rank["seconds"]
    assert rank["memory"]["rise_bytes"] > 0


def test_out_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    [text] = run_ranks(run_out, 1, str(tmp_path), device="cuda:0")
    assert "ran out of memory in" in text
    assert (tmp_path / "profile" / "out-of-memory-rank-0.pickle").stat().st_size
