"""One model, spread by hand in every way that a checkpoint may come from, or go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from instep.checkpoint.files import Checkpoint
from instep.core.mesh import Mesh
from instep.parallel.batch_context import BatchContext
from instep.parallel.strategy import NO_HINTS, ModelHints, Reducer, StepSums, Strategy
from instep.train.train_state import TrainState
from instep.world.grid import Grid
from instep.world.world import World


class Net(nn.Module):
    """Tied weights, rows that do not come out even, a buffer, a layer large enough to be dealt out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6)
        self.odd = nn.Linear(6, 3)
        self.large = nn.Linear(160, 128, bias=False)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight


class _StageModule(nn.Module):
    """Some children of a model, under their own names."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, getattr(model, name))


STAGES = (("embed", "up", "norm"), ("down", "odd", "large", "head"))
_TENSOR_PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "odd": ColwiseParallel(),
    "large": ColwiseParallel(),
}


def _whole(model: nn.Module, grid: Grid) -> nn.Module:
    return model


def _fsdp(model: nn.Module, grid: Grid) -> nn.Module:
    assert grid.devices is not None
    mesh = grid.devices["dp", "fsdp"] if grid.mesh.dp > 1 else grid.devices["fsdp"]
    for name in ("up", "down", "large"):
        fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp_columns(model: nn.Module, grid: Grid) -> nn.Module:
    assert grid.devices is not None
    fully_shard(model.large, mesh=grid.devices["fsdp"], shard_placement_fn=lambda _: Shard(1))
    return fully_shard(model, mesh=grid.devices["fsdp"])


def _tensor(model: nn.Module, grid: Grid) -> nn.Module:
    assert grid.devices is not None
    return parallelize_module(model, grid.devices["tp"], _TENSOR_PLAN)


def _both(model: nn.Module, grid: Grid) -> nn.Module:
    return _fsdp(_tensor(model, grid), grid)


def _stage(model: nn.Module, grid: Grid) -> nn.Module:
    own = _StageModule(model, STAGES[grid.mesh.coordinate(grid.world.rank, "pp")])
    if "head" in STAGES[grid.mesh.coordinate(grid.world.rank, "pp")]:  # tied over two stages: a copy
        own.head.weight = nn.Parameter(own.head.weight.detach().clone())
    return _fsdp_stage(own, grid) if grid.mesh.fsdp > 1 else own


def _fsdp_stage(model: nn.Module, grid: Grid) -> nn.Module:
    assert grid.devices is not None
    return fully_shard(model, mesh=grid.devices["fsdp"])


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    spread: Callable[[nn.Module, Grid], nn.Module]


LAYOUTS = {
    "single": Layout(Mesh(), _whole),
    "ddp@2": Layout(Mesh(dp=2), _whole),
    "fsdp@2": Layout(Mesh(fsdp=2), _fsdp),
    "fsdp@4": Layout(Mesh(fsdp=4), _fsdp),
    "columns@2": Layout(Mesh(fsdp=2), _fsdp_columns),
    "hybrid@4": Layout(Mesh(dp=2, fsdp=2), _fsdp),
    "tensor@2": Layout(Mesh(tp=2), _tensor),
    "fsdp×tensor@4": Layout(Mesh(fsdp=2, tp=2), _both),
    "pipeline@2": Layout(Mesh(pp=2), _stage),
    "pipeline×dp@4": Layout(Mesh(pp=2, dp=2), _stage),
    "pipeline×fsdp@4": Layout(Mesh(pp=2, fsdp=2), _stage),
}


class ByHand(Strategy):
    """Spreads as a layout says; trains nothing."""

    name: ClassVar[str] = "by hand"

    def __init__(self, grid: Grid, layout: str) -> None:
        super().__init__(grid, BatchContext(grid.world.device, 0))
        self._layout = LAYOUTS[layout]
        self.is_partial = not grid.mesh.has_whole_models
        self.has_all_names = grid.mesh.pp == 1

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        return self._layout.spread(model, self.grid)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return _NoReducer(parameters)


class _NoReducer(Reducer):
    def reduce(self, sums: StepSums) -> StepSums:
        return sums


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, one without decay."""
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def spread(world: World, layout: str, seed: int = 0) -> tuple[Grid, TrainState]:
    """Build the model of a seed on this rank, as a layout says."""
    grid = Grid.open(world, LAYOUTS[layout].mesh)
    torch.manual_seed(seed)
    return grid, TrainState(Net(), make_optimizer, None, ByHand(grid, layout), "")


def state_of(trained: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds of a model and its optimizer."""
    return {part.name: part.save() for part in trained.parts()}


def restore(trained: TrainState, checkpoint: Checkpoint) -> None:
    """Restore a model and its optimizer."""
    for part in trained.parts():
        assert part.restore is not None
        part.restore(checkpoint)


def update(trained: TrainState, num_steps: int = 3) -> None:
    """Move the weights, by a gradient that each element knows of itself."""
    for _ in range(num_steps):
        for p in trained.model.parameters():
            p.grad = torch.cos(p.detach() * 3)
        trained.optimizer.step()
    for name, buffer in trained.model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.25)


def whole(tree: Any) -> Any:
    """Gather what is sharded. Called on all ranks that have it."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().clone()
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list | tuple) else tree
