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

from instep.parallel.capture import Call
from instep.parallel.dropout import own_dropout
from instep.parallel.norm import sync_batch_norm
from instep.parallel.scope import Scope
from instep.parallel.silence import silence_outputs
from instep.world.grid import Grid

Example = Callable[[], Call]
"""Gives the arguments of a model's call for a few rows, on CPU."""


class Reducer(ABC):
    """Makes the gradients of one optimizer's parameters the same on all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @abstractmethod
    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        """Add gradients, in place, and `sums` up over all ranks; give the sums. Called on all ranks."""

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

    def __init__(self, grid: Grid, scope: Scope) -> None:
        self.grid = grid
        self.scope = scope
        self.plan_of: Callable[[nn.Module], Mapping[str, Any]] | None = None
        """Gives the Task's own tensor plan."""
        self.notices: list[str] = []
        """What a person should know of how a model was spread."""

    def spread(self, model: nn.Module, example: Example | None = None) -> nn.Module:
        """Bring a model to this rank: same layers, same weights, same answer as on one. Called on all ranks.

        `example` gives what the model is called with for a few rows, where that is known; the same on all ranks.
        """
        del example  # for strategies that have to look into the model
        model = own_dropout(model, self.scope)
        if sync_batch_norm(model, self.grid.data, self.scope):
            silence_outputs(model, self.scope)
        model = model.to(self.grid.world.device)
        # The seed gives every rank the same weights; what a model drew from elsewhere is settled here.
        self.grid.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    @abstractmethod
    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:
        """Make the reducer of one optimizer's parameters; `num_sums` numbers travel with the gradients."""
