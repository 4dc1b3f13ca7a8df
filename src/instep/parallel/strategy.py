"""What every way to spread a model over ranks must be able to do.

A strategy is chosen once, before the model exists. It spreads the model, and makes for each optimizer the
reducer that agrees with the other ranks on gradients. The loop knows these two and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.parallel.batch_context import BatchContext
from instep.parallel.blocks import Blocks
from instep.parallel.capture import Call
from instep.parallel.dropout import replace_dropout
from instep.parallel.norm import sync_batch_norm
from instep.parallel.zero_weight import zero_gradient_of_outputs
from instep.world.grid import Grid

Example = Callable[[], Call]
"""Gives the arguments of a model's call for a few rows, on CPU."""
Layers = Callable[[nn.Module], Sequence[Callable[..., Any]]]
"""Gives a model's layers: applied one after the other, they make up the model."""
TensorPlanOf = Callable[[nn.Module], Mapping[str, Any]]
"""Says how a model's layers are split, by their paths: in words, or as PyTorch's ParallelStyles."""


class Reducer(ABC):
    """Makes the gradients of one optimizer's parameters the same on all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @abstractmethod
    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        """Add gradients, in place, and `sums` up over all ranks; give the sums. Called on all ranks."""

    def be_ready(self) -> None:  # noqa: B027 - most have nothing to do
        """Make passes possible that not every rank makes; before the parts of a step, in exact mode. On all ranks."""

    def end_step(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what `be_ready` got; in exact mode."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what was gathered in this step so far."""

    def end_shard(self, sums: Sequence[float | torch.Tensor]) -> None:
        """Take the gradient of a shard, in exact mode, with what it adds to the step's sums."""
        raise NotImplementedError

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient's global norm; give the norm before."""
        return nn.utils.clip_grad_norm_(self.parameters, max_norm)


class Strategy(ABC):
    """One way to spread a model."""

    name: ClassVar[str]
    in_step = False
    """Whether the ranks that share a batch speak in every forward pass, so that all must make as many."""

    def __init__(self, grid: Grid, context: BatchContext) -> None:
        self.grid = grid
        self.context = context
        self._loud: list[nn.Module] = []
        """Models that have no need for silence ([Note: Parts of weight 0]), as long as no model has."""
        self.said: list[str] = []
        """What a person should know of how the model was spread."""
        self.layers: Layers | None = None
        """How the next model may be cut, where its Task says so."""
        self.blocks: Blocks | None = None
        """What of the next model is gathered, or computed again, at a time, where its Task says so."""
        self.tensor_plan: TensorPlanOf | None = None
        """How the next model's layers are split, where its Task says so."""

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build a model that is to be spread."""
        return make()

    def spread(self, model: nn.Module, example: Example | None = None) -> nn.Module:
        """Bring a model to this rank: same layers, same weights, same answer as on one. Called on all ranks.

        `example` gives what the model is called with for a few rows, where that is known; the same on all ranks.
        """
        del example  # for strategies that have to look into the model
        model = self.replace_layers(model)
        model = model.to(self.grid.world.device)
        # The seed gives every rank the same weights; what a model drew from elsewhere is settled here.
        self.grid.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    def replace_layers(self, model: nn.Module) -> nn.Module:
        """Let the layers that depend on the whole batch know of it."""
        model = replace_dropout(model, self.context)
        self.connect(model, bool(sync_batch_norm(model, self.grid.data, self.context)))
        return model

    def connect(self, model: nn.Module, connected: bool) -> None:
        """Note whether ranks exchange something in a model's backward pass; if so in one, all are to be silenced."""
        self._loud.append(model)
        self.context.connected |= connected
        while self._loud and self.context.connected:
            zero_gradient_of_outputs(self._loud.pop(), self.context)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer fit the way its parameters are spread."""
        for group in optimizer.param_groups:
            # Each operation on a piece has a price of its own, on CPU many times that of the numbers: as few as can be.
            is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
            if is_open and any(isinstance(p, DTensor) for p in group["params"]):
                group["foreach"] = True

    def smallest_part(self, rows: int) -> int:
        """Tell how many rows, over all ranks, the smallest piece has into which `rows` rows are cut."""
        return rows

    def num_parameters(self, model: nn.Module) -> int:
        """Count the numbers that a model learns, on whichever ranks they are."""
        return sum(p.numel() for p in model.parameters())

    def notices(self, rows: int) -> list[str]:
        """Say what a person should know before the training, in which a part has `rows` rows for each copy."""
        del rows
        return self.said

    def report(self) -> list[str]:
        """Say what a person should know after the training. Called on all ranks."""
        return []

    @abstractmethod
    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:
        """Make the reducer of one optimizer's parameters; `num_sums` numbers travel with the gradients."""
