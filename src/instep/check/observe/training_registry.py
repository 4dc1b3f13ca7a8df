"""What this rank trains: its wrapped models and its optimizers, and to which of them a parameter belongs.

Ranks: all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.check.observe.samples import take_samples


@dataclass
class Wrapper:
    """A model that DistributedDataParallel or FSDP takes care of."""

    number: int
    strategy: str
    model: weakref.ref[nn.Module]
    parameters: dict[int, str] = field(default_factory=dict)
    """The names, by identity, when it was wrapped."""

    @property
    def inner(self) -> nn.Module | None:
        """The user's model; None: it is gone."""
        model = self.model()
        return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass
class KnownOptimizer:
    """An optimizer, as far as it was seen."""

    number: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    num_steps: int = 0
    num_parameters: int = 0
    """In the previous step."""
    is_stepping: bool = False

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, as they are now."""
        optimizer = self.optimizer()
        if optimizer is None:
            return []
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def has_gradient(self) -> bool:
        """Return whether gradients are there that are not zero; a few parameters are looked at."""
        parameters = self.parameters
        some = parameters[:: max(1, len(parameters) // 4)]
        gradients = [parameter.grad for parameter in some]
        if any(gradient is not None and type(gradient) is not torch.Tensor for gradient in gradients):
            return True  # a part of a distributed tensor, whose values are not looked at
        return not take_samples(gradients).are_zero


class TrainingRegistry:
    """The models and optimizers of this rank."""

    def __init__(self) -> None:
        self.wrappers: list[Wrapper] = []
        self._wrapper_of: dict[int, Wrapper] = {}
        self._optimizers: list[KnownOptimizer] = []
        self._order = 0

    def tick(self) -> int:
        """Return the next number of the timeline."""
        self._order += 1
        return self._order

    def add_wrapper(self, model: nn.Module, strategy: str) -> Wrapper:
        """Register a wrapped model."""
        wrapper = Wrapper(len(self.wrappers), strategy, weakref.ref(model))
        self.wrappers.append(wrapper)
        self._wrapper_of[id(model)] = wrapper
        if (inner := wrapper.inner) is not None:
            wrapper.parameters = {id(parameter): name for name, parameter in inner.named_parameters()}
        return wrapper

    def wrapper_of(self, model: nn.Module) -> Wrapper | None:
        """Return the wrapper that a model is."""
        wrapper = self._wrapper_of.get(id(model))
        return wrapper if wrapper is not None and wrapper.model() is model else None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> KnownOptimizer:
        """Take an optimizer into the books."""
        known = KnownOptimizer(len(self._optimizers), weakref.ref(optimizer))
        self._optimizers.append(known)
        return known

    def optimizer_of(self, optimizer: torch.optim.Optimizer) -> KnownOptimizer | None:
        """Return what is known of an optimizer."""
        return next((known for known in self._optimizers if known.optimizer() is optimizer), None)

    @property
    def optimizers(self) -> Iterator[KnownOptimizer]:
        """The optimizers that still exist."""
        return (known for known in self._optimizers if known.optimizer() is not None)

    def owners(self) -> dict[int, tuple[Wrapper, str]]:
        """Return by its identity to which wrapped model a parameter belongs, and its name there."""
        return {
            id(parameter): (wrapper, name)
            for wrapper in self.wrappers
            if (inner := wrapper.inner) is not None
            for name, parameter in inner.named_parameters()
        }

    def optimizers_with(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the numbers of the optimizers that hold one of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return [known.number for known in self.optimizers if any(id(own) in wanted for own in known.parameters)]
