"""Where numbers stop being finite: trace a model's forward and backward pass once more.

Ranks: each its own modules and tensors. Costs nothing until a loss or gradient is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.world.tensors import nested_tensors


def what_is_wrong(tree: Any) -> str:
    """Return how many elements of nested tensors are not finite, in words; empty: none. Of DTensors, local ones."""
    nans = infinities = 0
    for tensor in nested_tensors(tree):
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.is_floating_point() or tensor.is_complex():
            nans += int(tensor.isnan().sum())
            infinities += int(tensor.isinf().sum())
    return " and ".join([f"{nans} NaN"] * (nans > 0) + [f"{infinities} infinite"] * (infinities > 0))


def lost_parameter(model: nn.Module) -> str:
    """Return the first parameter that is not finite, in words; empty: none. The step may have changed buffers."""
    for name, p in model.named_parameters():
        if wrong := what_is_wrong(p):
            return f"in the parameter {name}, which has {wrong}"
    return ""


class Trace:
    """Finds the first module whose inputs are finite and whose output is not, while this context is active."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        self.begin_part()

    def begin_part(self) -> None:
        """Forget the last part's findings; called before each forward pass."""
        self.num_checks = 0
        """Modules and gradients checked until the first finding: the rank with the smallest number found it first."""
        self.forward = ""
        """The first module of the forward pass, in words."""
        self.input = ""
        """What is not finite in the model's input."""
        self.backward = ""
        """The first gradient that is not finite, in words."""
        self._were_finite: list[bool] = []
        self._hooked: set[int] = set()

    def __enter__(self) -> Trace:
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        for name, p in self._model.named_parameters():
            if p.requires_grad:
                self._handles.append(p.register_hook(self._check_gradient(f"the parameter {name}")))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Before the module runs: one that works in place overwrites its inputs.
        wrong = what_is_wrong((args, kwargs))
        self._were_finite.append(not wrong)
        if module is self._model:
            self.input = self.input or wrong

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        was_finite = self._were_finite.pop()
        if self.forward:
            return
        self.num_checks += 1
        name = self._describe(module)
        if was_finite and (wrong := what_is_wrong(output)):
            self.forward = f"in {name}: its inputs are finite, its output has {wrong}"
        for tensor in nested_tensors(output):
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if tensor.requires_grad and id(tensor) not in self._hooked:  # a container returns its last child's output
                self._hooked.add(id(tensor))
                tensor.register_hook(self._check_gradient(f"the output of {name}"))

    def _check_gradient(self, whose: str) -> Any:
        def check(grad: torch.Tensor) -> None:
            self.num_checks += not self.backward
            if not self.backward and (wrong := what_is_wrong(grad)):
                self.backward = (
                    f"in the backward pass only: the first gradient that is not finite is that of {whose}, "
                    f"which has {wrong}"
                )

        return check

    def _describe(self, module: nn.Module) -> str:
        # instep's own layers replace the user's, and are subclasses of them.
        kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("instep.parallel")]
        kind = kinds[0].__name__
        return f"{self._names[module]} ({kind})" if self._names[module] else f"the model ({kind})"
