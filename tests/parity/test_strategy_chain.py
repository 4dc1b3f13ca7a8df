"""One run, stopped and continued under another strategy and world size again and again, ends as if it had not been."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.events.schema import StepRecord
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from recipes import Recipe

STEPS = 12


@dataclass(kw_only=True)
class Stopping(Recipe):
    """Asks its own process to stop, as a scheduler would."""

    stop_at: int = 0

    def on_step(self, record: StepRecord) -> None:
        if record.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)


def train_on(world: World, folder: str, stop_at: int, options: dict[str, Any]) -> tuple[str, int, str]:
    dtype = torch.float32 if options.get("exact") else torch.float64
    task = Stopping(
        model_name="tied", optimizer_name="adamw", dtype=dtype, num_samples=47, weighted=True, stop_at=stop_at
    )
    spec = TrainSpec(
        steps=STEPS, batch_size=13, clip_norm=1.0, ema=0.8, seed=5, threads=1, save_every="never", **options
    )
    with process_settings(spec, world.world_size):
        result = worker_main(world, task, spec, RunDirectory(Path(folder)))
    return result.status, result.steps, result.weights_sha256


Leg = tuple[int, int, dict[str, Any]]
ACROSS: list[Leg] = [
    (2, 2, {"strategy": "ddp"}),
    (4, 4, {"strategy": "fsdp"}),
    (2, 6, {"strategy": "tensor"}),
    (2, 8, {"strategy": "pipeline"}),
    (1, 0, {"strategy": "single"}),
]
EXACT: list[Leg] = [
    (2, 2, {"strategy": "ddp"}),
    (4, 4, {"strategy": "fsdp"}),
    (1, 6, {"strategy": "single"}),
    (3, 8, {"strategy": "fsdp"}),
    (2, 0, {"strategy": "ddp"}),
]


def go_through(folder: Path, legs: list[Leg], **more: Any) -> tuple[str, int, str]:
    for world_size, stop_at, options in legs:
        told = run_ranks(train_on, world_size, str(folder), stop_at, {**options, **more}, timeout_s=120)
        assert len(set(told)) == 1, "the ranks do not agree"
        # Asked in one step, the ranks agree on it with the next one's gradients.
        assert told[0][:2] == (("preempted", stop_at + 1) if stop_at else ("complete", STEPS))
    return told[0]


@pytest.mark.timeout(300)
def test_across_all_strategies(tmp_path: Path) -> None:
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    go_through(alone, [(1, 0, {"strategy": "single"})])
    told = go_through(changing, ACROSS)
    wanted, actual = losses(alone), losses(changing)
    assert list(actual) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(wanted, rel=1e-11)
    for ema in (True, False):  # the average of the weights, too
        weights, others = load_weights(alone, ema), load_weights(changing, ema)
        assert weights.keys() == others.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-9, atol=1e-9)
    assert told[2] == weights_sha256(others)


@pytest.mark.timeout(300)
def test_the_same_bits_in_exact_mode(tmp_path: Path) -> None:
    alone = go_through(tmp_path / "alone", [(1, 0, {"strategy": "single"})], exact=True)
    changing = go_through(tmp_path / "changing", EXACT, exact=True)
    assert changing == alone
    assert losses(tmp_path / "changing") == losses(tmp_path / "alone")
    averages = [weights_sha256(load_weights(tmp_path / name, ema=True)) for name in ("changing", "alone")]
    assert averages[0] == averages[1] != alone[2]


def losses(run_dir: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run_dir) if e["event"] == "step"}
