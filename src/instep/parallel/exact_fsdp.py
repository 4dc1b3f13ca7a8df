"""Exact mode with sharded parameters and optimizer state.

[Note: Exact sharding]
The gradient of a shard of the batch must be complete and unreduced before it enters the canonical tree ([Note: Exact
mode]), and ranks have different numbers of such shards. So the parameters are unsharded once, before the first pass of
a step, FSDP2's gradient reduction is off, and the tree adds whole gradients as it does without sharding: same passes,
same additions, same norm, same bits. Each rank's slice of the sums is then the gradient of its shard of the parameters,
which are resharded before the update. Between steps a rank holds its shards and their optimizer state; within a step,
whole parameters and gradients.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from instep.parallel.batch_context import BatchContext
from instep.parallel.exact import Exact, ExactReducer
from instep.parallel.fsdp import Fsdp, Sharding
from instep.parallel.gradients import from_local
from instep.parallel.strategy import ModelHints, Reducer, StepSums
from instep.world.grid import Grid


class ExactShardedReducer(ExactReducer):
    """Adds whole gradients; each rank keeps its shard of the sums ([Note: Exact sharding])."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], grid: Grid, context: BatchContext) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._sharded = list(parameters)
        self._fsdp_rank, self._fsdp_size = grid.mesh.coordinate(grid.world.rank, "fsdp"), grid.mesh.fsdp
        names = {id(p): name for name, p in model.named_parameters()}
        for module in self._modules:
            module.set_requires_gradient_sync(False)
        self.be_ready()
        whole = dict(model.named_parameters())
        super().__init__([whole[names[id(p)]] for p in parameters], grid.data, context)
        self.end_step()

    def be_ready(self) -> None:
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.unshard()

    def forget(self) -> None:
        super().forget()
        for p in self.parameters:
            p.grad = None

    def reduce(self, sums: StepSums) -> StepSums:
        totals = super().reduce(sums)
        for sharded, whole in zip(self._sharded, self.parameters, strict=True):
            sharded.grad = None if whole.grad is None else self._shard_of(whole.grad, like=sharded)
        self.end_step()
        return totals

    def _shard_of(self, gradient: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
        """Return this rank's shard of a whole gradient, in the same memory, which is scaled and clipped later."""
        chunks = gradient.chunk(self._fsdp_size)
        return from_local(chunks[self._fsdp_rank] if self._fsdp_rank < len(chunks) else gradient[:0], like)

    def end_step(self) -> None:
        for module in self._modules:
            module.set_reshard_after_forward(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
            module.reshard()


class ExactFsdp(Exact):
    """Parameters and optimizer state sharded over the ranks, with the same bits as on one rank."""

    name = "exact fsdp"
    is_partial = True
    gathers_weights = True
    axes = ("fsdp",)

    def __init__(self, grid: Grid, context: BatchContext) -> None:
        super().__init__(grid, context)
        self._sharding = Fsdp(grid, context, Sharding())
        self._models: dict[int, nn.Module] = {}

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        model = super().spread(model, hints)
        self._sharding.shard(model, hints)
        self._models |= {id(p): model for p in model.parameters()}
        return model

    def rest(self, model: nn.Module) -> None:
        self._sharding.rest(model)

    def set_trainable(self, model: nn.Module, trainable: Mapping[nn.Parameter, bool]) -> None:
        self._sharding.set_trainable(model, trainable)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return ExactShardedReducer(self._models[id(parameters[0])], parameters, self.grid, self.context)
