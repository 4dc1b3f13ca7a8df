"""Take fingerprints of what the user's variables hold: numbers, tensors, modules, generators, orders, dicts of ids.

Ranks: all. Nothing is called that the user wrote.
"""

from __future__ import annotations

import array
import inspect
import sys
import types
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from instep.check.observe.generators import generator_state
from instep.check.observe.samples import digest
from instep.core.frames import is_users

_MOST = 1500
"""Paths that are looked at."""
_MAX_DEPTH = 3
_MAX_IDS = 512
_MAX_ORDER = 1 << 20
_MAX_LAYERS = 256
_MAX_ELEMENTS = 1 << 22
"""Larger tensors are data, not state."""
_MAX_PARAMETERS = 512
_SKIPPED = (str, bytes, bool, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.dtype)
_NUMBERS = (int, float, numpy.integer, numpy.floating)
_PLAIN = (torch.Tensor, torch.nn.Parameter, numpy.ndarray)
"""Subclasses may run the user's code for anything that is asked of them."""
_OWN = 3
"""References to the dict of a frame's variables: of the frame, of the function that looks, and of the call."""
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
_FRAMEWORKS = ("accelerate", "datasets", "instep", "lightning", "numpy", "pytorch_lightning", "torch", "transformers")
"""Packages whose objects hold much that is of this rank alone."""


@dataclass
class LiveValues:
    """Fingerprints by path, as LiveState has them."""

    script: str
    trained: set[int]
    """Identities of the parameters that optimizers step: their modules are no copies."""
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    generators: dict[str, int] = field(default_factory=dict)
    ids: dict[str, dict[str, int]] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _num_paths: int = 0

    def add_frame(self, frame: types.FrameType) -> None:
        """Look at the variables of a function, or of a file."""
        scope = f"{frame.f_code.co_filename}|{frame.f_code.co_name}|"
        for name, value in _variables(frame).items():
            if not name.startswith("__"):
                self._add(scope + name, value, _MAX_DEPTH)

    def add_optimizer(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Look at the numbers of an optimizer's parameter groups."""
        for index, group in enumerate(optimizer.param_groups[:_MAX_LAYERS]):
            for key, value in group.items():
                is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
                if is_number or (isinstance(value, torch.Tensor) and value.numel() == 1):
                    self.settings[f"{number}.{index}.{key}"] = float(value)

    def _add(self, path: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, _SKIPPED) or self._num_paths >= _MOST:
            return
        if isinstance(value, _NUMBERS):
            self._num_paths += 1
            self.numbers[path] = float(value)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._num_paths += 1
        if isinstance(value, torch.Tensor | numpy.ndarray):
            if type(value) in _PLAIN:
                self._add_tensor(path, value, self.tensors)
        elif (state := generator_state(value)) is not None:
            self.generators[path] = state
        elif isinstance(value, torch.nn.Module):
            self._add_module(path, value, depth)
        elif isinstance(value, dict):
            if _is_iterated_by(value, dict):
                self._add_mapping(path, value, depth)
        elif isinstance(value, list | tuple | deque):
            if any(_is_iterated_by(value, kind) for kind in (list, tuple, deque)):
                self._add_sequence(path, value)
        elif depth:
            self._add_object(path, value, depth)

    def _add_tensor(self, path: str, value: torch.Tensor | numpy.ndarray[Any, Any], into: dict[str, int]) -> None:
        if isinstance(value, numpy.ndarray):
            self._add_array(path, value, into)
        elif isinstance(value, torch.Tensor) and _is_order(value):
            self.orders[path] = digest([value])
        elif value.numel() == 1 and not isinstance(value, DTensor) and not value.is_meta and not value.is_complex():
            self.numbers[path] = float(value.detach())
        elif _is_state(value):
            into[path] = digest([value])

    def _add_array(self, path: str, value: numpy.ndarray[Any, Any], into: dict[str, int]) -> None:
        if not 0 < value.size <= _MAX_ELEMENTS:
            return
        if value.dtype.kind == "f":
            into[path] = zlib.crc32(numpy.ascontiguousarray(value).tobytes())
        elif value.dtype.kind in "iu" and value.ndim == 1 and value.size > 1:
            self.orders[path] = zlib.crc32(numpy.ascontiguousarray(value).tobytes())
        elif value.dtype.kind in "UO" and value.ndim == 1:
            self._add_sequence(path, value.tolist())

    def _add_module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._seen.add(id(inner))
        parameters = list(inner.parameters())
        is_trained = any(id(parameter) in self.trained for parameter in parameters)
        if is_trained:
            self._add_layers(path, inner)
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            return
        if parameters and not is_trained:
            self.weights[path] = digest(parameters[:_MAX_PARAMETERS])
        for name, part in inner.named_modules():
            if isinstance(part, _BatchNorm):
                continue
            prefix = ".".join(filter(None, (path, name)))
            for key, buffer in part._buffers.items():
                if buffer is not None and buffer.numel() <= _MAX_ELEMENTS and not isinstance(buffer, DTensor):
                    self.buffers[f"{prefix}.{key}"] = digest([buffer])
            for key, parameter in part._parameters.items() if is_trained and self._is_users(part) else ():
                if parameter is not None and not parameter.requires_grad and parameter.numel() <= _MAX_ELEMENTS:
                    self.buffers[f"{prefix}.{key}"] = digest([parameter])
            for key, value in list(vars(part).items()) if self._is_users(part) else ():
                if key in _OF_TORCH or isinstance(value, torch.nn.Module):
                    continue
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    self._add_tensor(f"{prefix}.{key}", value, self.buffers)
                elif depth:
                    self._add(f"{prefix}.{key}", value, depth - 1)

    def _add_layers(self, path: str, module: torch.nn.Module) -> None:
        """Look at the mode of each layer, and at the numbers that torch's layers compute with."""
        for name, part in list(module.named_modules())[:_MAX_LAYERS]:
            told = [f"training={part.training}"]
            if type(part).__module__.startswith("torch.nn"):
                told += [f"{key}={value:g}" for key, value in vars(part).items() if type(value) is float]
            self.layers[".".join(filter(None, (path, name)))] = ", ".join(told)

    def _add_mapping(self, path: str, value: dict[Any, Any], depth: int) -> None:
        items = list(value.items())
        if not items or len(items) > 4 * _MAX_IDS:
            return
        if 1 < len(items) <= _MAX_IDS and all(_is_id(key, entry) for key, entry in items):
            self.ids[path] = {str(key): int(entry) for key, entry in items}
        elif all(isinstance(entry, torch.Tensor) for _, entry in items):
            # BatchNorm's statistics differ by rank wherever they are not synchronised: another rule's.
            states = [entry for key, entry in items if _is_state(entry) and "running_" not in str(key)]
            if states:
                self.tensors[path] = digest(states[:_MAX_PARAMETERS])
        elif depth and len(items) <= 64:
            for key, entry in items:
                self._add(f"{path}.{key}", entry, depth - 1)

    def _add_sequence(self, path: str, value: list[Any] | tuple[Any, ...] | deque[Any]) -> None:
        if not 1 < len(value) <= _MAX_ORDER:
            return
        if type(value[0]) is int:
            if (order := _packed("q", value)) is not None:
                self.orders[path] = zlib.crc32(order)
            return
        if len(value) > _MAX_IDS:
            return
        if type(value[0]) is float:
            if (state := _packed("d", value)) is not None:
                self.tensors[path] = zlib.crc32(state)
            return
        if all(isinstance(entry, str) for entry in value) and len(set(value)) == len(value):
            self.ids[path] = {entry: index for index, entry in enumerate(value)}
        elif all(isinstance(entry, torch.Tensor) and _is_state(entry) for entry in value):
            self.tensors[path] = digest(value)

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, DataLoader | Subset):
            self._add(f"{path}.dataset", value.dataset, depth)
        elif type(value).__module__.partition(".")[0] in _FRAMEWORKS:
            return
        elif not self._is_users(value):
            self._add_fitted(path, value)
        else:
            for key, entry in _attributes(value):
                self._add(f"{path}.{key}", entry, depth - 1)

    def _add_fitted(self, path: str, value: Any) -> None:
        """Look at what an object of an installed package has learnt of data, as scikit-learn names it: `mean_`."""
        for key, entry in _attributes(value):
            if key.endswith("_") and not key.startswith("_"):
                self._add(f"{path}.{key}", entry, 0)

    def _is_users(self, value: Any) -> bool:
        name = type(value).__module__
        file = getattr(sys.modules.get(name), "__file__", None)
        return name == "__main__" or (isinstance(file, str) and (is_users(file) or file == self.script))


def _variables(frame: types.FrameType) -> dict[str, Any]:
    """Return the variables of a frame, which keeps none of them alive for it."""
    variables = frame.f_locals
    copied = dict(variables)
    # Before Python 3.13 a function's frame keeps the dict, unless the script holds it by `locals()`: two references.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict and sys.getrefcount(variables) <= _OWN:
        variables.clear()
    return copied


def _is_state(tensor: torch.Tensor) -> bool:
    return (
        not isinstance(tensor, DTensor)
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and 0 < tensor.numel() <= _MAX_ELEMENTS
    )


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, without calling a `__getattr__` of its class."""
    try:
        return list(object.__getattribute__(value, "__dict__").items())
    except AttributeError:  # it has slots
        return []


def _is_iterated_by(value: Any, kind: Any) -> bool:
    """Return whether a collection is iterated as a built-in kind is, by no code of the user's."""
    made: Any = type(value)
    if not issubclass(made, kind) or made.__module__ == "collections":
        return issubclass(made, kind)
    return made.__iter__ is kind.__iter__ and getattr(made, "items", None) is getattr(kind, "items", None)


def _is_order(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in (torch.int64, torch.int32)
        and tensor.layout is torch.strided
        and tensor.dim() == 1
        and not tensor.is_meta
        and 1 < tensor.numel() <= _MAX_ELEMENTS
    )


def _packed(kind: str, values: list[Any] | tuple[Any, ...] | deque[Any]) -> bytes | None:
    """Return numbers as bytes; None: they are not all of that kind."""
    try:
        return array.array(kind, values).tobytes()
    except (OverflowError, TypeError):
        return None


def _is_id(key: Any, value: Any) -> bool:
    return isinstance(key, str | int) and isinstance(value, int) and not isinstance(value, bool)
