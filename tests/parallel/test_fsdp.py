"""Sharding: what a rank holds, what is gathered together, how a model is built that fits no rank."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import SpecError, TaskError
from instep.core.spec import TrainSpec
from instep.parallel.fsdp import own_blocks
from instep.parallel.gradients import to_local
from instep.parallel.strategy import NO_HINTS
from instep.train.engine import Engine
from instep.train.worker import open_run, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

WIDTH, DEPTH = 256, 6


def deep_model(width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def bytes_held(world: World, folder: str, options: dict[str, Any]) -> int:
    """Train a few steps; give the bytes of parameters, gradients and optimizer state on this rank."""
    spec = TrainSpec(batch_size=8, steps=2, save_every="never", **options)
    with open_run(world, spec, RunDirectory(Path(folder)), "held", own_loop=True) as run:
        model, optimizer = run.prepare(deep_model(), lambda p: torch.optim.Adam(p, lr=1e-3))
        for step in run.steps(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))):
            for x in step.shards():
                step.backward(model(x).square().mean())
            step.finish()
        tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        for p in model.parameters():
            assert p.grad is not None
            tensors += [p, p.grad]
        return sum(t.numel() * t.element_size() for t in map(to_local, tensors))


@pytest.mark.parametrize(("options", "most"), [({"strategy": "fsdp"}, 0.27), ({"mesh": "dp=2,fsdp=2"}, 0.52)])
def test_a_rank_holds_its_share(tmp_path: Path, options: dict[str, Any], most: float) -> None:
    whole = run_ranks(bytes_held, 1, str(tmp_path / "one"), {})[0]
    held = run_ranks(bytes_held, 4, str(tmp_path / "several"), options)
    assert max(held) <= most * whole, (held, whole)


KINDS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]


def updated_by(world: World, folder: str, options: dict[str, Any]) -> list[float]:
    """Train a little with each of several optimizers; give a number for the weights of each."""
    result = []
    for kind in KINDS:
        spec = TrainSpec(batch_size=8, steps=3, save_every="never", threads=1, **options)
        with open_run(world, spec, RunDirectory(Path(folder) / kind.__name__), "held", own_loop=True) as run:
            model, _ = run.prepare(deep_model(5, 3), lambda p, kind=kind: kind(p, lr=1e-2))  # uneven pieces
            for step in run.steps(torch.randn(32, 5, generator=torch.Generator().manual_seed(0))):
                for x in step.shards():
                    step.backward(model(x).square().mean())
                step.finish()
            result.append(sum(float(whole(p).double().square().sum()) for p in model.parameters()))
    return result


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


def test_optimizers_update_pieces_as_they_update_wholes(tmp_path: Path) -> None:
    wanted = run_ranks(updated_by, 1, str(tmp_path / "one"), {})[0]
    for number, result in enumerate(run_ranks(updated_by, 3, str(tmp_path / "three"), {"strategy": "fsdp"})):
        assert result == pytest.approx(wanted, rel=1e-5), number
    assert len(set(wanted)) == len(KINDS)


class Branching(nn.Module):
    """Goes one way or the other by what is in its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left if x[0, 0] > 0 else self.right)(x)


def branch(world: World, folder: str) -> str:
    spec = TrainSpec(batch_size=2, steps=1, save_every="never", strategy="fsdp")
    with (
        pytest.raises(TaskError) as caught,
        open_run(world, spec, RunDirectory(Path(folder)), "held", own_loop=True) as run,
    ):
        model, _ = run.prepare(Branching(), lambda p: torch.optim.SGD(p, lr=1e-2))
        for step in run.steps(torch.tensor([[1.0] * 4, [-1.0] * 4])):
            for x in step.shards():
                step.backward(model(x).square().mean())
            step.finish()
    return str(caught.value)


def test_ranks_that_use_different_parameters_are_told(tmp_path: Path) -> None:
    assert all("did not use the same parameters" in message for message in run_ranks(branch, 2, str(tmp_path)))


def two_models(world: World, folder: str, options: dict[str, Any]) -> float:
    """Train two models at once, on parts of which some count nothing and have a mean of 0/0."""
    spec = TrainSpec(batch_size=2, steps=8, save_every="never", threads=1, **options)
    with open_run(world, spec, RunDirectory(Path(folder)), "held", own_loop=True) as run:
        one, _ = run.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda p: torch.optim.SGD(p, lr=1e-2))
        other, _ = run.prepare(deep_model(4, 2), lambda p: torch.optim.SGD(p, lr=1e-2))
        numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16)
        for step in run.steps(numbers):
            for x, index in step.shards():
                weights = (index < 8).float()
                each = (other(x) + 0 * one(torch.cat([x, x + 1])).sum()).square().mean(1)
                step.backward((each * weights).sum() / weights.sum(), weight=weights.sum())
            step.finish()
        result = run.evaluate(lambda _, batch: {"other": other(batch[0])[:, 0]}, numbers)
        return result["other"]


@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {"strategy": "fsdp"}])
def test_parts_that_count_nothing_leave_a_second_model_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = run_ranks(two_models, 1, str(tmp_path / "one"), {})[0]
    assert run_ranks(two_models, 2, str(tmp_path / "two"), options) == [pytest.approx(wanted, rel=1e-4)] * 2


def copy_it(world: World) -> str:
    engine = Engine(world, TrainSpec(strategy="fsdp"))
    model = engine.strategy.spread(deep_model(4, 2), NO_HINTS)
    with pytest.raises(TaskError) as caught:
        copy.deepcopy(model)
    return str(caught.value)


def test_a_copy_is_refused_with_a_way_out() -> None:
    assert "sharded over the ranks" in run_ranks(copy_it, 2)[0]


class Count:
    """A metric that its Task keeps, and that counts on."""

    def __init__(self) -> None:
        self.seen = torch.zeros((), dtype=torch.int64)

    def update(self, rows: int) -> None:
        self.seen += rows

    def compute(self) -> float:
        return float(self.seen)


class Twice(Small):
    """Calls its model with new tensors for the loss and for the metrics, on a set that does not come out even."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def eval_data(self) -> Any:
        return made_up(11, seed=2)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x * 1), y)

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.count.update(len(y))
        return {"accuracy": model(x * 1).argmax(1) == y, "seen": self.count}


def evaluated(world: World, folder: str, options: dict[str, Any]) -> dict[str, float]:
    spec = TrainSpec(batch_size=16, steps=2, save_every="never", eval_every="never", threads=1, **options)
    return worker_main(world, Twice(), spec, RunDirectory(Path(folder))).metrics


@pytest.mark.parametrize("world_size", [2, 4])
def test_evaluation_counts_every_sample_once(tmp_path: Path, world_size: int) -> None:
    wanted = run_ranks(evaluated, 1, str(tmp_path / "one"), {})[0]
    result = run_ranks(evaluated, world_size, str(tmp_path / "several"), {"strategy": "fsdp"})
    assert result == [pytest.approx(wanted, rel=1e-5)] * world_size
    assert wanted["seen"] == 11


def two_updates(world: World, folder: str, options: dict[str, Any]) -> list[float]:
    """Update one model in the middle of a step, and save after every step."""
    spec = TrainSpec(batch_size=16, epochs=2, save_every="1", exact=True, shards=4, **options)
    result = []
    with open_run(world, spec, RunDirectory(Path(folder)), "held", own_loop=True) as run:
        one, _ = run.prepare(deep_model(4, 2), lambda p: torch.optim.Adam(p, lr=1e-2))
        other, others = run.prepare(deep_model(4, 2), lambda p: torch.optim.Adam(p, lr=1e-2))
        for step in run.steps(
            torch.randn(33, 4, generator=torch.Generator().manual_seed(0))
        ):  # the last batch: one row
            for x in step.shards():
                step.backward(other(one(x).detach()).square().mean())
            step.update(others)
            for x in step.shards():
                step.backward(other(one(x)).square().mean())
            result.append(step.finish().loss)
    return result


def test_exact_sharding_with_two_updates_a_step(tmp_path: Path) -> None:
    wanted = run_ranks(two_updates, 1, str(tmp_path / "one"), {})[0]
    assert run_ranks(two_updates, 2, str(tmp_path / "two"), {"strategy": "fsdp"}) == [wanted] * 2


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = deep_model(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).view(-1, 2, 2)


def write_to_output(world: World, folder: str) -> str:
    spec = TrainSpec(batch_size=8, steps=1, save_every="never", strategy="fsdp")
    with open_run(world, spec, RunDirectory(Path(folder)), "held", own_loop=True) as run:
        model, _ = run.prepare(Viewing(), lambda p: torch.optim.SGD(p, lr=1e-2))
        for step in run.steps(torch.randn(32, 4, generator=torch.Generator().manual_seed(0))):
            for x in step.shards():
                output = model(x)
                with pytest.raises(RuntimeError, match="cloning the output") as caught:
                    output[:, 0] *= 2
                step.backward(output.square().mean())
            step.finish()
    return str(caught.value)


def test_an_output_that_is_a_view_cannot_be_written_to(tmp_path: Path) -> None:
    assert "modified inplace" in run_ranks(write_to_output, 2, str(tmp_path))[0]


def units(world: World) -> list[str]:
    engine = Engine(world, TrainSpec(strategy="fsdp"))
    blocks, last = deep_model(4, 3), nn.Linear(4, 4)
    last.weight = blocks[2][0].weight
    spread = engine.strategy.spread(nn.Sequential(nn.Linear(4, 4), blocks, last), NO_HINTS)
    return [name for name, module in spread.named_modules() if isinstance(module, FSDPModule)]


def test_a_block_with_a_tied_weight_is_no_unit_of_its_own() -> None:
    assert run_ranks(units, 2)[0] == ["", "1.0", "1.1"]


def test_blocks_that_share_nothing_are_units() -> None:
    assert [name for name, _ in own_blocks(deep_model(4, 3))] == ["0", "1", "2"]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def build(world: World, meta_init: bool) -> tuple[float, list[float]]:
    """Build and spread a model of 256 MB; give by how much this process grew at most, and its numbers."""

    def make() -> nn.Module:
        model = deep_model(4096, 4)
        for p in model.parameters():
            nn.init.normal_(p, std=0.02)
        return model

    engine = Engine(world, TrainSpec(strategy="fsdp", meta_init=meta_init))
    torch.manual_seed(0)
    before, most, ended = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, resident())
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    model = engine.strategy.spread(engine.strategy.build(make), NO_HINTS)
    ended.set()
    watching.join()
    return (most - before) / 2**20, [float(p.detach().full_tensor().double().sum()) for p in model.parameters()]


def test_a_model_is_built_block_by_block() -> None:
    usual, deferred = run_ranks(build, 4, False), run_ranks(build, 4, True)
    assert deferred[0][1] == usual[0][1] == deferred[3][1]
    assert max(grown for grown, _ in usual) > 256  # so the measurement sees something
    assert max(grown for grown, _ in deferred) < 0.7 * 256  # its share, and one block


@pytest.mark.parametrize(
    ("options", "size", "says"),
    [
        ({"mesh": "dp=2,tp=3"}, 8, r"dp\(2\) × tp\(3\) = 6 ≠ 8 processes"),
        ({"mesh": "tp=2"}, 4, r"tp\(2\) = 2 ≠ 4 processes. Use 2 processes, or dp=2"),
        ({"strategy": "single"}, 2, "one process, and there are 2"),
        ({"meta_init": True}, 2, "Use --strategy fsdp"),
        ({"reshard": False}, 2, "Use --strategy fsdp"),
        ({"strategy": "fsdp", "exact": True, "reshard": False}, 2, "would have no effect"),
        ({"strategy": "tensor", "compile": True}, 2, "torch.compile cannot trace"),
        ({"mesh": "fsdp=2,tp=2", "compile": True}, 4, "torch.compile cannot trace"),
        ({"strategy": "fsdp", "compile": True, "exact": True}, 2, "which rounds differently"),
        ({"exact": True, "mesh": "dp=2,tp=2"}, 4, "also splits its layers"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], size: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        TrainSpec(**options).mesh_of(size)


@pytest.mark.parametrize("mesh", ["dp", "dp=0", "dp=2,dp=2", "xp=2", "dp=2;tp=2", ""])
def test_a_mesh_that_cannot_be_read(mesh: str) -> None:
    with pytest.raises(SpecError, match="write for instance dp=2,tp=4"):
        TrainSpec(mesh=mesh)
