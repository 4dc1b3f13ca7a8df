"""Where numbers cease to be finite: looks on while a model goes forward and backward once more.

Room: the modules and tensors of this rank; speaks to nobody. Costs nothing before something is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def what_is_wrong(tree: Any) -> str:
    """Count what is not finite in the tensors of anything nested, in words; empty: nothing."""
    nans = infinities = 0
    for tensor in _tensors(tree):
        if tensor.is_floating_point() or tensor.is_complex():
            nans += int(tensor.isnan().sum())
            infinities += int(tensor.isinf().sum())
    return " and ".join([f"{nans} NaN"] * (nans > 0) + [f"{infinities} infinite"] * (infinities > 0))


def lost_parameter(model: nn.Module) -> str:
    """Name the first parameter that is not finite; empty: none. Buffers: the step itself may have spoilt them."""
    for name, p in model.named_parameters():
        if wrong := what_is_wrong(p):
            return f"in the parameter {name}, which has {wrong}"
    return ""


class Trace:
    """Finds the first module that makes something that is not finite from what is, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        self.begin_part()

    def begin_part(self) -> None:
        """Forget what was found; called before each forward pass."""
        self.num_looks = 0
        """Modules left, and then gradients seen, until it was found: a smaller number came first."""
        self.forward = ""
        """Where it begins in the forward pass, in words."""
        self.input = ""
        """What is wrong with what the model was given."""
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
                self._handles.append(p.register_hook(self._look_at(f"the parameter {name}")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Before the module is entered: one that works in place overwrites what it was given.
        wrong = what_is_wrong((args, kwargs))
        self._were_finite.append(not wrong)
        if module is self._model:
            self.input = self.input or wrong

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        was_finite = self._were_finite.pop()
        if self.forward:
            return
        self.num_looks += 1
        name = self._describe(module)
        if was_finite and (wrong := what_is_wrong(output)):
            self.forward = f"in {name}: its inputs are finite, its output has {wrong}"
        for tensor in _tensors(output):
            if tensor.requires_grad and id(tensor) not in self._hooked:  # a container gives what its last child gave
                self._hooked.add(id(tensor))
                tensor.register_hook(self._look_at(f"the output of {name}"))

    def _look_at(self, whose: str) -> Any:
        def look(grad: torch.Tensor) -> None:
            self.num_looks += not self.backward
            if not self.backward and (wrong := what_is_wrong(grad)):
                self.backward = (
                    f"in the backward pass only: the first gradient that is not finite is that of {whose}, "
                    f"which has {wrong}"
                )

        return look

    def _describe(self, module: nn.Module) -> str:
        # instep's own layers stand in for the user's, and have those as their base.
        kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("instep.parallel")]
        kind = kinds[0].__name__
        return f"{self._names[module]} ({kind})" if self._names[module] else f"the model ({kind})"


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.to_local() if isinstance(tree, DTensor) else tree  # of a shared one, what is here
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))
