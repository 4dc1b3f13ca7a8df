"""Watch optimizers: what they were built with, when gradients are cleared, and what each step is made of.

Ranks: all.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.check.observe.backwards import BackwardObserver
from instep.check.observe.forwards import ForwardObserver
from instep.check.observe.gathers import GatherObserver
from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.observe.samples import Samples, take_samples
from instep.check.observe.training_registry import KnownOptimizer, TrainingRegistry
from instep.check.records.gradients import GradientsCleared, OptimizerBuilt, StepTaken

_DETAILED_STEPS = 3
_DETAILED_EVERY = 4
_DETAILED_PARAMETERS = 2000
_SPARSE_PARAMETERS = 64
"""How many parameters are looked at in a step of which not every parameter is written down."""


class GradientObserver(Observer):
    """Watches optimizers itself, and everything that a step is made of through other observers."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._trained = TrainingRegistry()
        self._forwards = ForwardObserver(log, self._trained)
        self._gathers = GatherObserver(log, self._trained)
        self._backwards = BackwardObserver(log, self._trained, self._gathers)
        self._begun: dict[int, tuple[list[torch.Tensor], Samples]] = {}
        """By optimizer, since its step began: the parameters that are looked at, and their values. Steps may nest."""

    def install(self) -> None:
        """Put the hooks in place."""
        for observer in (self._forwards, self._gathers, self._backwards):
            observer.install()
        self.wrap(torch.optim.Optimizer, "__init__", self._built)
        self.wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self.wrap(nn.Module, "zero_grad", self._module_zero_grad)
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._stepped)

    def _built(self, original: Any, optimizer: torch.optim.Optimizer, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        known = self._trained.add_optimizer(optimizer)
        order = self._trained.tick()
        self.log.write(
            OptimizerBuilt,
            order=order,
            optimizer=known.number,
            num_parameters=len(known.parameters),
            callers=self.log.callers(sys._getframe()),
        )

    def _zero_grad(self, original: Any, optimizer: torch.optim.Optimizer, /, *args: Any, **kwargs: Any) -> None:
        known = self._trained.optimizer_of(optimizer)
        if known is not None:
            self._write_cleared(known)
        original(optimizer, *args, **kwargs)

    def _module_zero_grad(self, original: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        held = {id(parameter) for parameter in module.parameters()}
        for known in self._trained.optimizers:
            if all(id(parameter) in held for parameter in known.parameters):
                self._write_cleared(known)
        original(module, *args, **kwargs)

    def _write_cleared(self, known: KnownOptimizer) -> None:
        with self.log.unobserved():
            self.log.write(
                GradientsCleared,
                order=self._trained.tick(),
                optimizer=known.number,
                lost=known.has_gradient(),
                in_step=known.is_stepping,
            )

    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        # One that was copied or unpickled was not seen when it was built.
        known = self._trained.optimizer_of(optimizer) or self._trained.add_optimizer(optimizer)
        known.is_stepping = True
        with self.log.unobserved():
            chosen = self._chosen(known)
            self._begun[known.number] = chosen, take_samples(chosen)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        known = self._trained.optimizer_of(optimizer)
        if known is None or known.number not in self._begun:
            return
        known.is_stepping = False
        with self.log.unobserved():
            self._write_step(known, optimizer, *self._begun.pop(known.number))
            self._gathers.forget()
        known.num_steps += 1
        known.num_parameters = len(known.parameters)

    def _chosen(self, known: KnownOptimizer) -> list[torch.Tensor]:
        """Return the parameters that are looked at in this step."""
        parameters = known.parameters
        most = _DETAILED_PARAMETERS if _is_detailed(known) else _SPARSE_PARAMETERS
        return parameters[:: -(-len(parameters) // most)] if parameters else []

    def _write_step(
        self, known: KnownOptimizer, optimizer: torch.optim.Optimizer, chosen: Sequence[torch.Tensor], before: Samples
    ) -> None:
        gradients = take_samples([parameter.grad for parameter in chosen])
        parameters = known.parameters
        owners = self._owners(chosen)
        self.log.write(
            StepTaken,
            order=self._trained.tick(),
            optimizer=known.number,
            number=known.num_steps,
            num_parameters=len(parameters),
            num_without_gradient=sum(parameter.grad is None for parameter in parameters),
            all_zero=not known.has_gradient(),
            orphans=self._orphans() if _is_detailed(known) else 0,
            num_collectives=self._gathers.num_collectives,
            learning_rate=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else 0.0,
            is_detailed=_is_detailed(known),
            gradient_hash=_combined(gradients.hashes, owners),
            gradient_norm=_norms(gradients.norms, owners),
            parameter_hash=_combined(before.hashes, owners),
            samples=self._backwards.samples(),
            **(_details(owners, gradients, before) if _is_detailed(known) else {}),
        )

    def _owners(self, chosen: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
        """Return the wrapper (-1: none; -2: it is sharded) and the name of each parameter."""
        owners = self._trained.owners()
        result: list[tuple[int, str]] = []
        for index, parameter in enumerate(chosen):
            wrapper, name = owners.get(id(parameter), (None, f"parameter {index} {list(parameter.shape)}"))
            number = -1 if wrapper is None else wrapper.number
            result.append((number if wrapper is None or wrapper.strategy == "ddp" else -2, name))
        return result

    def _orphans(self) -> int:
        """Return how many parameters of wrapped models have a gradient, and belong to no optimizer."""
        held = {id(parameter) for known in self._trained.optimizers for parameter in known.parameters}
        return sum(
            parameter.grad is not None and id(parameter) not in held
            for wrapper in self._trained.wrappers
            if (inner := wrapper.inner) is not None
            for parameter in inner.parameters()
        )


def _is_detailed(known: KnownOptimizer) -> bool:
    """Return whether each parameter of a step is written down: in the first, in some later ones, and after changes."""
    if known.num_steps < _DETAILED_STEPS or known.num_steps % _DETAILED_EVERY == 0:
        return True
    return len(known.parameters) != known.num_parameters


def _combined(hashes: Sequence[int], owners: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Return one hash for all parameters of each wrapper; sharded ones are left out."""
    together: dict[str, int] = {}
    for value, (wrapper, _) in zip(hashes, owners, strict=True):
        if wrapper >= -1:
            together[str(wrapper)] = zlib.crc32(str(value).encode(), together.get(str(wrapper), 0))
    return together


def _norms(norms: Sequence[float], owners: Sequence[tuple[int, str]]) -> dict[str, float]:
    """Return one norm for all parameters of each wrapper; sharded ones are left out."""
    squares: dict[str, float] = {}
    for norm, (wrapper, _) in zip(norms, owners, strict=True):
        if wrapper >= -1:
            squares[str(wrapper)] = squares.get(str(wrapper), 0.0) + norm * norm
    return {wrapper: math.sqrt(square) for wrapper, square in squares.items()}


def _details(owners: Sequence[tuple[int, str]], gradients: Samples, before: Samples) -> dict[str, Any]:
    """Return what StepTaken has for each parameter."""
    kept = [index for index, (wrapper, _) in enumerate(owners) if wrapper >= -1]
    hashes, norms, values = gradients.hashes, gradients.norms, before.hashes
    return {
        "names": [owners[index][1] for index in kept],
        "wrappers": [owners[index][0] for index in kept],
        "hashes": [hashes[index] for index in kept],
        "norms": [norms[index] for index in kept],
        "parameter_hashes": [values[index] for index in kept],
    }
