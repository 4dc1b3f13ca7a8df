"""Profiles of trainings: what they record, on one clock, without changing a bit of the result."""

from __future__ import annotations

import itertools
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.guard.pulse import Phase, Pulse
from instep.profile.operations import ANNOTATION, Slice, slices_by_thread
from instep.profile.overlap import measure_overlap
from instep.profile.report import write_report
from instep.profile.trace import RankTrace, read_trace, write_trace
from instep.train.profiling import _plan, phases_marked
from instep.train.worker import worker_main
from instep.world.device import ACCELERATORS, device_backends
from instep.world.world import World
from profile_traces import info
from ranks import run_ranks
from tasks import made_up

STEPS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            torch.empty(2**48)  # more than there is
        return x + torch.tanh(self.inner(x))


@dataclass(kw_only=True)
class Small(instep.Task):
    """A few blocks; `slow_rank` sleeps in its steps, `breaks_at` is the step in which memory runs out."""

    slow_rank: int = -1
    breaks_at: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    def train_data(self) -> Any:
        x, y = made_up(64, dtype=torch.float32)
        return torch.utils.data.TensorDataset(x[:, :1].repeat(1, 16), y)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        self.calls = getattr(self, "calls", 0) + 1
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == self.slow_rank:
            time.sleep(0.02)
        if self.calls == self.breaks_at:
            x = x * float("nan")
        return (model(x).squeeze(1) - y.float()).square().mean()


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any] | None = None) -> str:
    """Train, and return the hash of the weights."""
    values = {"batch_size": 16, "steps": STEPS, "data_workers": 0, "save_every": "never", "eval_every": "never"}
    spec = TrainSpec(**{**values, **options})
    result = worker_main(world, Small(**(fields or {})), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    return result.weights_sha256


def train_both_ways(world: World, folder: str, options: dict[str, Any]) -> tuple[str, str]:
    """Train without and with a profile."""
    plain = train(world, f"{folder}/plain", options)
    return plain, train(world, f"{folder}/profiled", {**options, "profile": "3:6", "profile_ranks": "all"})


def traces_of(folder: Path) -> list[RankTrace]:
    return [read_trace(path) for path in sorted((folder / "profile").glob("rank-*.trace.json.gz"))]


def phases_of(trace: RankTrace, name: str) -> list[Slice]:
    slices = itertools.chain(*slices_by_thread(trace.timed(), (ANNOTATION,)).values())
    return sorted(one for one in slices if one.name == f"instep.{name}")


def check_traces(folder: Path, num_ranks: int) -> list[RankTrace]:
    """Check what every profile of the steps 3 to 5 has."""
    traces = traces_of(folder)
    assert [trace.info.rank for trace in traces] == list(range(num_ranks))
    for trace in traces:
        assert (trace.info.first, trace.info.last, trace.info.memory_step) == (3, 5, 6)
        names = [event["name"] for event in trace.events if event.get("cat") == "steps"]
        assert names == ["step 3", "step 4", "step 5", "step 6"]
        labels = [event["args"]["name"] for event in trace.events if event["name"] == "process_name"]
        assert labels == [f"rank {trace.info.rank}"]
        assert any(event["name"] == "[memory]" for event in trace.with_memory())
        assert not any(event["name"] == "[memory]" for event in trace.timed())
    text = "\n".join(write_report(folder / "profile", "3:6", device_backends()))
    assert text.startswith("profile of steps 3 to 5:\n  rank 0: ")
    assert not list((folder / "profile").glob(".*"))
    return traces


def test_a_profile_changes_no_bit_and_the_ranks_are_on_one_clock(tmp_path: Path) -> None:
    hashes = run_ranks(train_both_ways, 2, str(tmp_path), {"exact": True, "seed": 3})
    assert len({hash_ for pair in hashes for hash_ in pair}) == 1
    traces = check_traces(tmp_path / "profiled", 2)
    assert not (tmp_path / "plain" / "profile").exists()
    for trace in traces:
        # One communication in each step; in exact mode a forward and a backward pass for each shard.
        assert len(phases_of(trace, "communication")) == 3
        assert len(phases_of(trace, "optimizer")) == 3
        assert len(phases_of(trace, "forward")) == len(phases_of(trace, "backward")) == 3 * 8
        assert trace.info.holders[0]["module"] in {f"{number}.inner" for number in range(4)}
        assert trace.info.holders[0]["optimizer_state_bytes"] >= 2 * trace.info.holders[0]["parameters_bytes"]
    # No rank leaves a step's reduction before the others have entered it.
    for one, other in zip(*(phases_of(trace, "communication") for trace in traces), strict=True):
        assert one.begin_us < other.end_us
        assert other.begin_us < one.end_us
    summary = json.loads((tmp_path / "profiled" / "profile" / "summary.json").read_text())
    assert {"forward", "backward", "communication", "optimizer", "data"} <= set(summary["ranks"][0]["phases"])
    total = sum(summary["ranks"][0]["phases"].values())
    assert total == pytest.approx(summary["ranks"][0]["seconds"], rel=0.2)


@pytest.mark.slow  # test_a_profile_changes_no_bit_and_the_ranks_are_on_one_clock is in make test
@pytest.mark.parametrize(
    ("options", "comm"),
    [
        ({}, "auto"),
        ({}, "gloo"),
        ({"strategy": "fsdp"}, "auto"),
        ({"strategy": "fsdp", "exact": True}, "auto"),
        ({"strategy": "tensor"}, "auto"),
        ({"strategy": "pipeline"}, "auto"),
        ({"accumulate": 2, "clip_norm": 1.0, "ema": 0.9}, "auto"),
    ],
)
def test_every_strategy(options: dict[str, Any], comm: str, tmp_path: Path) -> None:
    hashes = run_ranks(train_both_ways, 2, str(tmp_path), options, comm=comm)
    assert all(plain == profiled for plain, profiled in hashes)
    for trace in check_traces(tmp_path / "profiled", 2):
        assert measure_overlap(trace.timed(), device_backends()).communication_s > 0


def with_clock(world: World, folder: str, ahead_ns: int) -> None:
    """Train where rank 1 has a host name and a clock of its own."""
    if world.rank == 1:
        real_ns, name = time.time_ns, socket.gethostname()
        time.time_ns = lambda: real_ns() + ahead_ns  # type: ignore[assignment]
        socket.gethostname = lambda: f"not-{name}"  # type: ignore[assignment]
    train(world, folder, {"profile": "3:6", "profile_ranks": "all"})


def test_clocks_of_two_nodes_are_compared_and_overlap_is_seen(tmp_path: Path) -> None:
    run_ranks(with_clock, 2, str(tmp_path), 10**9, apart=True)
    here, there = (trace.info for trace in traces_of(tmp_path))
    assert (here.ahead_ns, here.doubt_ns) == (0, 0)
    assert abs(there.ahead_ns - 10**9) <= there.doubt_ns
    assert 0 < there.doubt_ns < 5 * 10**8
    assert here.base_ns == there.base_ns
    for trace in traces_of(tmp_path):
        # Over a network, reductions run on a thread beside backward.
        assert measure_overlap(trace.timed(), device_backends()).communication_s > 0
        assert any(event["name"] == "instep.collective" for event in trace.timed())


def test_the_slowest_rank_is_profiled_by_default(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), {"profile": "6"}, {"slow_rank": 1})
    assert [trace.info.rank for trace in traces_of(tmp_path)] == [0, 1]


def test_a_short_training_is_profiled_as_far_as_it_goes(tmp_path: Path) -> None:
    run_ranks(train, 1, str(tmp_path), {"profile": "auto", "steps": 1})
    [trace] = traces_of(tmp_path)
    assert (trace.info.first, trace.info.last, trace.info.memory_step) == (1, 1, None)
    assert (
        "No step was left"
        in "\n".join(write_report(tmp_path / "profile", "auto", [])) + (tmp_path / "profile" / "summary.md").read_text()
    )


def fail_within(world: World, folder: str) -> str:
    """Run out of memory in a profiled step; return the error with its notes."""
    try:
        train(world, folder, {"profile": "2:6"}, {"breaks_at": 5})
    except RuntimeError as error:
        return "\n".join([str(error), *error.__notes__])
    raise AssertionError


def test_out_of_memory_is_explained_and_a_profile_under_way_is_kept(tmp_path: Path) -> None:
    [text] = run_ranks(fail_within, 1, str(tmp_path))
    assert "can't allocate memory" in text
    assert "Rank 0 ran out of memory in module 0 (Block), test_profiling.py:" in text
    assert "The largest holders by module: 0.inner 4." in text
    assert "optimizer state 2." in text
    assert "other live tensors hold" in text
    path = tmp_path / "profile" / "out-of-memory-rank-0.json"
    assert f"All holders: {path}" in text
    held = json.loads(path.read_text())
    assert {row["module"] for row in held["modules"]} == {*(f"{number}.inner" for number in range(4)), "4"}
    [end] = [event for event in read_events(tmp_path, 0) if event["event"] == "end"]
    assert "largest holders by module" in end["error"]
    [trace] = traces_of(tmp_path)
    assert 2 <= trace.info.first <= trace.info.last < 5


@pytest.mark.parametrize(
    ("asked", "step", "files", "plan"),
    [
        ("auto", 0, 0, [10, 14]),
        ("auto", 100, 0, [110, 114]),
        ("auto", 100, 1, "already has a profile"),
        ("auto", 0, 1, [10, 14]),  # from the beginning again: these steps come again
        ("10:15", 4, 1, [10, 14]),
        ("10:15", 12, 0, [13, 14]),
        ("10:15", 12, 1, "already has a profile"),
        ("10:15", 12, -1, [13, 14]),  # the last attempt ended within them
        ("10:15", 14, 0, "already at step 14"),
        ("300:305", 0, 0, "ends at step 200"),
    ],
)
def test_what_a_restart_profiles(asked: str, step: int, files: int, plan: Any, tmp_path: Path) -> None:
    for rank in range(abs(files)):
        write_trace(tmp_path, RankTrace(info(rank=rank, is_whole=files > 0), []))
    answer = _plan(asked, tmp_path, step, 200)
    assert plan in answer if isinstance(plan, str) else answer == plan


def test_nvtx_is_refused_where_there_is_none() -> None:
    spec = TrainSpec(nvtx=True)
    with (
        pytest.raises(SpecError, match="this run trains on cpu"),
        phases_marked(spec, torch.device("cpu"), Pulse(bytearray(64))),
    ):
        pass


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []
    both = (lambda name: heard.append(f"+{name}"), lambda: heard.append("-"))
    monkeypatch.setattr(type(ACCELERATORS["cuda"]), "ranges", lambda _self: both)
    return heard


def test_nvtx_ranges_follow_the_phases(ranges: list[str]) -> None:
    pulse = Pulse(bytearray(64))
    with phases_marked(TrainSpec(nvtx=True), torch.device("cuda", 0), pulse):
        pulse.beat(Phase.DATA)
        pulse.beat(Phase.FORWARD)
    assert pulse.listener is None
    pulse.beat(Phase.BACKWARD)
    assert ranges == ["+instep.startup", "-", "+instep.data", "-", "+instep.forward", "-"]
