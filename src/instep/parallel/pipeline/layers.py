"""A model as a sequence of layers that, applied one after the other, make up the model ([Note: Layer sequences])."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from instep.core.errors import TaskError
from instep.parallel.capture import Call
from instep.parallel.pipeline.ownership import Uses
from instep.parallel.pipeline.trace import REMEDY, TracedLayers
from instep.parallel.preserve import evaluating
from instep.parallel.strategy import Layers

StageFunction = Callable[[Call, Any], Any]
"""Computes consecutive layers, from the model's call and the output of the layers before (None for the first)."""


class LayerSequence(Protocol):
    """Layers, one after the other."""

    names: list[str]
    """One for each layer, for messages."""

    def uses(self, number: int) -> Uses:
        """Return what a layer computes with."""

    def stage(self, first: int, last: int) -> StageFunction:
        """Return a function that computes the layers first..last-1."""


def find_layers(model: nn.Module, layers: Layers | None, call: Call | None, min_layers: int) -> LayerSequence:
    """Return a model as a sequence of at least `min_layers` layers; raise with the reason if it cannot be one."""
    if layers is not None:
        return _NamedLayers(model, list(layers(model)), call)
    call = call or _tensor_call(model)
    reasons = []
    for deep in (False, True):
        try:
            traced = TracedLayers(model, call, deep)
        except Exception as error:  # noqa: BLE001 - a forward pass may raise anything when it gets a proxy of a tensor
            first_line = str(error).strip().split("\n")[0][:200]
            reasons.append(f"its forward pass cannot be traced ({type(error).__name__}: {first_line})")
            continue
        count = len(traced.names)
        if count >= min_layers:
            return traced
        reasons.append(
            f"it can be split into {count} {'pieces' if count > 1 else 'piece'} only, where a single value passes from "
            "one to the next"
        )
    raise TaskError(
        f"a {type(model).__name__} cannot be split into {min_layers} stages: {reasons[-1]}. {REMEDY} Or use fewer "
        "processes along pp."
    )


def _tensor_call(model: nn.Module) -> Call:
    """Return a substitute for an unknown call: each required argument is a tensor."""
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Call(tuple(torch.empty(0) for _ in positional), {})


class _NamedLayers:
    """Layers that the Task names."""

    def __init__(self, model: nn.Module, layers: list[Callable[..., Any]], call: Call | None) -> None:
        for number, layer in enumerate(layers):
            if not callable(layer):
                raise TaskError(
                    f"layers(model) returned a {type(layer).__name__} at position {number}; it must return modules or "
                    "functions."
                )
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [
            names.get(id(layer)) or str(getattr(layer, "__name__", f"layer {number}"))
            for number, layer in enumerate(layers)
        ]
        self._layers = layers
        self._uses = [Uses() for _ in layers]
        if all(isinstance(layer, nn.Module) for layer in layers):
            for layer, uses in zip(layers, self._uses, strict=True):
                uses.add_module(cast(nn.Module, layer))
        elif call is not None:
            self._record_uses(model, call)
        else:
            raise TaskError(
                "layers(model) returned functions, and what they compute with shows only when they are called. Return "
                "modules, or pass run.prepare an example of the model's call."
            )

    def _record_uses(self, model: nn.Module, call: Call) -> None:
        """Call the layers once, and record what they use: a function does not show it otherwise."""
        value: Any = None
        with evaluating(model), torch.no_grad():
            for number, uses in enumerate(self._uses):
                with _UseRecorder(model, uses):
                    value = self.stage(number, number + 1)(call, value)

    def uses(self, number: int) -> Uses:
        return self._uses[number]

    def stage(self, first: int, last: int) -> StageFunction:
        layers = self._layers[first:last]

        def compute(call: Call, value: Any) -> Any:
            for number, layer in enumerate(layers, first):
                value = layer(*call.positional, **call.named) if number == 0 else layer(value)
            return value

        return compute


class _UseRecorder(TorchFunctionMode):
    """Records the modules that are called, and the parameters and buffers that functions are called with."""

    def __init__(self, model: nn.Module, uses: Uses) -> None:
        super().__init__()
        self._tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._uses = uses
        self._hook: Any = None

    def __enter__(self) -> Any:
        self._hook = register_module_forward_pre_hook(lambda module, _: self._uses.add_module(module))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        leaves = tree_flatten((args, kwargs))[0]
        self._uses.tensors |= {id(leaf) for leaf in leaves if id(leaf) in self._tensors}
        return func(*args, **(kwargs or {}))
