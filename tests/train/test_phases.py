"""Where a rank's time went, by phase: planted delays are found in their phase, and nothing is lost or counted twice."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.events.schema import PHASES
from instep.guard.pulse import Phase, Pulse
from instep.train import flops
from instep.train.worker import worker_main
from instep.world.waits import Waits
from instep.world.world import World
from ranks import run_ranks

STEPS, DELAY_S = 10, 0.03


class SlowSamples(torch.utils.data.Dataset):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._delay_s)
        return torch.full((4,), index / 64)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S)
        return grad


@dataclass(kw_only=True)
class Delayed(instep.Task):
    """Takes DELAY_S longer for one thing in each step; `rank`: on that rank only."""

    where: str
    rank: int | None = None

    def delay(self, where: str) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if where == self.where and self.rank in (None, rank):
            time.sleep(DELAY_S)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.delay("optimizer"))
        return optimizer

    def train_data(self) -> Any:
        return SlowSamples(DELAY_S / 4 if self.where == "data" else 0)

    def eval_data(self) -> Any:
        return SlowSamples(0)

    def loss(self, model: Any, batch: Any) -> Any:
        self.delay("forward")
        output = model(batch)
        return (SlowBackward.apply(output) if self.where == "backward" else output).square().mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        self.delay("evaluation")
        return {"size": model(batch).abs().squeeze(1)}

    def on_step(self, record: Any) -> None:
        self.delay("hooks")


def train(world: World, run_dir: str, fields: dict[str, Any], options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Train, and return the events of all ranks."""
    options = {"data_workers": 0, "eval_every": "never", **options}
    spec = TrainSpec(batch_size=8, steps=STEPS, save_every="never", **options)
    worker_main(world, Delayed(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    return [read_events(Path(run_dir), rank) for rank in range(world.world_size)]


def phases_of(events: list[dict[str, Any]]) -> tuple[Counter[str], float]:
    """Return the seconds of each phase after the first two steps, and of all of them."""
    records = [event for event in events if event["event"] == "phases" and event["step"] > 2 and event["num_steps"]]
    total: Counter[str] = Counter()
    for record in records:
        total.update(record["phases"])
    return total, sum(record["seconds"] for record in records)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        *[(where, {}) for where in ("data", "forward", "backward", "optimizer", "hooks")],
        ("evaluation", {"eval_every": 1}),
        ("backward", {"accumulate": 2}),
    ],
)
def test_a_delay_is_found_in_its_phase(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    [events] = run_ranks(train, 1, str(tmp_path), {"where": where}, options)[0]
    phases, seconds = phases_of(events)
    assert set(phases) <= set(PHASES)
    assert phases.most_common(1)[0][0] == where
    assert phases[where] >= (STEPS - 2) * DELAY_S
    assert sum(phases.values()) == pytest.approx(seconds, abs=1e-4)


def test_all_of_a_process_is_counted_and_nothing_twice(tmp_path: Path) -> None:
    [events] = run_ranks(train, 1, str(tmp_path), {"where": "forward"}, {})[0]
    records = [event for event in events if event["event"] == "phases"]
    steps = [event for event in events if event["event"] == "step"]
    assert sum(record["num_steps"] for record in records) == STEPS
    assert sum(record["num_samples"] for record in records) == STEPS * 8
    for record in records:
        assert sum(record["phases"].values()) == pytest.approx(record["seconds"], rel=0.02, abs=1e-5)
    took_s = steps[-1]["time"] - steps[0]["time"]  # by another clock, at another moment of the step
    later = [record for record in records if record["step"] > 1 and record["num_steps"]]
    assert sum(record["seconds"] for record in later) == pytest.approx(took_s, rel=0.02, abs=0.1)
    assert all(DELAY_S <= record["longest_s"] <= record["seconds"] for record in later)
    assert [record["num_steps"] for record in records if record["step"] == STEPS] == [later[-1]["num_steps"], 0]
    assert events[-1]["event"] == "end"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_who_is_slow_does_not_wait_and_the_others_do(strategy: str, tmp_path: Path) -> None:
    where = "backward" if strategy == "pipeline" else "forward"  # the last stage computes the loss
    fields = {"where": where, "rank": None if strategy == "pipeline" else 1}
    by_rank = [phases_of(events)[0] for events in run_ranks(train, 2, str(tmp_path), fields, {"strategy": strategy})[0]]
    assert by_rank[1][where] >= (STEPS - 2) * DELAY_S
    assert by_rank[0][where] < 0.5 * by_rank[1][where]
    assert by_rank[0]["communication"] >= 0.7 * (STEPS - 2) * DELAY_S
    waited_s = sum(event["comm_s"] for event in read_events(tmp_path) if event["event"] == "phases")
    assert waited_s >= 0.7 * (STEPS - 2) * DELAY_S
    assert by_rank[1]["communication"] < 0.5 * by_rank[0]["communication"]
    ends = [{event["step"] for event in read_events(tmp_path, rank) if event["event"] == "phases"} for rank in (0, 1)]
    assert len(ends[0] & ends[1]) >= 3  # they can be put side by side


def test_batches_that_are_ready(tmp_path: Path) -> None:
    """Readers that keep up have batches ready, those that do not have fewer."""
    depths = {}
    for where in ("data", "forward"):
        [events] = run_ranks(train, 1, str(tmp_path / where), {"where": where}, {"data_workers": 1})[0]
        seen = [event["queue"] for event in events if event["event"] == "phases" and event["queue"] is not None]
        depths[where] = statistics.fmean(seen[1:])
    assert depths["data"] < 0.75 * depths["forward"]
    assert depths["forward"] > 0.9
    [events] = run_ranks(train, 1, str(tmp_path / "here"), {"where": "forward"}, {})[0]
    assert {event["queue"] for event in events if event["event"] == "phases"} == {None}


def test_model_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_LEAST_S", 0.05)
    task = Delayed(where="forward")
    with World.join(Place()) as world:
        spec = TrainSpec(batch_size=8, steps=STEPS, save_every="never", eval_every="never")
        worker_main(world, task, spec, RunDirectory(tmp_path))
    [record] = [event for event in read_events(tmp_path) if event["event"] == "flops"]
    assert record["flops_per_sample"] == 3 * 2 * (4 * 4 + 4 * 1)
    steps = [event["time"] for event in read_events(tmp_path) if event["event"] == "step"]
    per_s = 8 * (STEPS - 1) / (steps[-1] - steps[0])
    assert record["flops_per_s"] == pytest.approx(record["flops_per_sample"] * per_s, rel=0.1)
    assert record["device_flops_per_s"] > 1e8


def test_a_pulse_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], Waits()
    waits.seconds = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pulse = Pulse(bytearray(64))
    pulse.watch_waits(waits)
    heard: list[Phase] = []
    pulse.listener = heard.append
    now[0] += 1.0
    pulse.beat(Phase.FORWARD)
    now[0] += 4.0
    waits.seconds += 3.0
    with pulse.during(Phase.EVALUATE):
        now[0] += 0.5
    now[0] += 2.0
    pulse.move(Phase.FORWARD, Phase.BACKWARD, 0.25)
    pulse.beat(Phase.DATA)
    expected = {Phase.STARTING: 1.0, Phase.FORWARD: 2.75, Phase.BACKWARD: 0.25, Phase.REDUCE: 3.0, Phase.EVALUATE: 0.5}
    assert pulse.seconds == [expected.get(phase, 0.0) for phase in Phase]
    assert heard == [Phase.FORWARD, Phase.EVALUATE, Phase.FORWARD, Phase.DATA]
