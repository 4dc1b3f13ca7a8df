"""What holds memory: the tensors of models and optimizers by module, and others that are alive.

Ranks: any, alone; no collectives, also after a failure.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.core.frames import is_users

PARAMETERS, GRADIENTS, BUFFERS, OPTIMIZER = "parameters", "gradients", "buffers", "optimizer_state"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS)
_NUM_HOLDERS = 10


class ModelAndOptimizers(NamedTuple):
    """A model, and the optimizers of its parameters."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]


class LiveTensor(NamedTuple):
    """A tensor that is no model's and no optimizer's."""

    num_bytes: int
    description: str


def holders_by_module(trained: Iterable[ModelAndOptimizers]) -> list[dict[str, Any]]:
    """Return how many bytes the tensors of each module hold, by kind, the largest first; tied tensors count once."""
    by_module: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    seen: set[tuple[int, int]] = set()
    for module, kind, tensor in _tensors(trained):
        local = _local(tensor)
        # Not by storage: gradients may be pieces of one.
        memory = (local.data_ptr() if local.layout == torch.strided else id(local), local.nbytes)
        if memory not in seen:
            seen.add(memory)
            by_module[module][kind] += local.nbytes
    rows: list[dict[str, Any]] = [
        {
            "module": module or "(the model itself)",
            "total_bytes": sum(kinds.values()),
            **{f"{kind}_bytes": num_bytes for kind, num_bytes in kinds.items()},
        }
        for module, kinds in by_module.items()
    ]
    return sorted((row for row in rows if row["total_bytes"]), key=lambda row: -row["total_bytes"])[:_NUM_HOLDERS]


def live_tensors(trained: Iterable[ModelAndOptimizers], device: str) -> list[LiveTensor]:
    """Return the other tensors of a kind of device that Python objects refer to, the largest first."""
    seen = {_storage(tensor)[0] for _, _, tensor in _tensors(trained)}
    live = []
    for thing in gc.get_objects():
        # By its type: `isinstance` would ask objects that stand for others, which may compute something.
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != device or thing.is_meta:
            continue
        storage, num_bytes = _storage(thing)
        if storage not in seen:
            seen.add(storage)
            shape = "×".join(map(str, thing.shape)) or "scalar"
            live.append(LiveTensor(num_bytes, f"{shape} {str(thing.dtype).removeprefix('torch.')}"))
    return sorted(live, reverse=True)


def where_in_model(trained: Iterable[ModelAndOptimizers], failed: TracebackType | None) -> str:
    """Return which module a traceback ended in, and the user's line; empty: in none."""
    names = {id(module): name for one in trained for name, module in one.model.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(failed):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            module = f"module {names[id(owner)]}" if names[id(owner)] else "the model"
            module += f" ({type(owner).__name__})"
        if is_users(frame.f_code.co_filename):
            line = f"{os.path.basename(frame.f_code.co_filename)}:{number}"
    return f"{module}, {line}" if module and line else module or line


def models_alive() -> list[ModelAndOptimizers]:
    """Return the models and optimizers of this process that nobody has told us about: those of a plain script."""
    modules, optimizers = [], []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):
            modules.append(thing)
        elif issubclass(type(thing), torch.optim.Optimizer):
            optimizers.append(thing)
    children = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in children]
    # Not those without parameters: losses, and modules that were taken out of a model.
    return [ModelAndOptimizers(root, optimizers) for root in roots if next(root.parameters(), None) is not None]


def _tensors(trained: Iterable[ModelAndOptimizers]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the module, the kind and the tensor of all that models and optimizers hold."""
    for model, optimizers in trained:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            yield _module(name), PARAMETERS, parameter
            if parameter.grad is not None:
                yield _module(name), GRADIENTS, parameter.grad
        for name, buffer in model.named_buffers():
            yield _module(name), BUFFERS, buffer
        for optimizer in optimizers:
            for owner, state in optimizer.state.items():
                for value in state.values() if isinstance(state, dict) and id(owner) in names else ():
                    if isinstance(value, torch.Tensor):
                        yield _module(names[id(owner)]), OPTIMIZER, value


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
    return local


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return an identity of the memory that a tensor is a part of, and its bytes."""
    local = _local(tensor)
    if local.layout != torch.strided:
        return id(local), 0
    storage = local.untyped_storage()
    return storage.data_ptr() or id(storage), storage.nbytes()
