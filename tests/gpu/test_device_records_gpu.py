"""What a training on a GPU records of the device: steps on its own clock, and its sensors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Wide(Small):
    """The device computes much longer than the host launches."""

    def model(self) -> nn.Module:
        layers = [layer for _ in range(10) for layer in (nn.Linear(8000, 8000), nn.ReLU())]
        return nn.Sequential(nn.Linear(6, 8000), *layers, nn.Linear(8000, 3))

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x.float().repeat(64, 1)), y.repeat(64))

    def eval_data(self) -> None:
        return None


class Waiting(Wide):
    """The device waits for the host."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 3)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return super().loss(model, batch)


def train(world: World, task: Small, run_dir: str, steps: int) -> None:
    spec = TrainSpec(batch_size=16, steps=steps, precision="fp32", compile=False, eval_every="never")
    worker_main(world, task, spec, RunDirectory(Path(run_dir)))


def records_of(task: Small, folder: Path, steps: int) -> list[dict[str, Any]]:
    run_ranks(train, 1, task, str(folder), steps, device="cuda:0", timeout_s=250)
    return [json.loads(line) for line in (folder / "events" / "rank-0.jsonl").read_text().splitlines()]


def timed_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of phases with a step timed on the device, without those of the start."""
    return [record for record in records if record["event"] == "phases" and record.get("num_timed_steps")][1:]


def test_a_busy_device_sets_the_pace_and_its_sensors_are_read(tmp_path: Path) -> None:
    records = records_of(Wide(), tmp_path, 300)
    timed = timed_steps(records)
    assert len(timed) >= 3
    for record in timed:
        step_s = record["seconds"] / record["num_steps"]
        on_device = record["device_phases"]
        assert sum(on_device.values()) == pytest.approx(step_s, rel=0.25)
        assert on_device["backward"] > 1.3 * on_device["forward"] > 0
        assert record["device_lag_s"] > 0.3 * step_s
        assert record["device_peak_bytes"] >= record["device_bytes"] > 10 * 8000**2 * 4
    if sensed := [record for record in records if record["event"] == "device"]:
        assert max(record["utilisation"] for record in sensed) > 0.8
        assert all(20 < record["temperature_c"] < 110 and record["power_w"] > 20 for record in sensed)
    else:
        pytest.skip("the sensors were not seen: pip install 'instep[gpu]'")


def test_a_device_that_waits_for_the_host_has_no_lag(tmp_path: Path) -> None:
    timed = timed_steps(records_of(Waiting(), tmp_path, 200))
    assert len(timed) >= 2
    for record in timed:
        assert record["device_lag_s"] < 0.2 * record["seconds"] / record["num_steps"]
