"""Take a state apart into tensors and JSON, and put it together again.

[Note: State trees]
A state_dict is a tree of dicts, lists, tuples, numbers, strings and tensors. Tensors go into a safetensors
file under numbered names, the rest into a JSON skeleton in which `{"$tensor": name}` stands for a tensor.
JSON has neither tuples, nor keys that are not strings, nor infinities; those are written as objects whose
only key begins with `$`. Anything else is refused by name: a pickle would run code when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from instep.core.errors import CheckpointError


def take_apart(tree: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state into its skeleton and its tensors, which are not copied; `where` names it in errors."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, numpy.generic):
            node = node.item()
        if isinstance(node, torch.Tensor):
            return {"$tensor": _store(node, path, tensors, names)}
        if node is None or isinstance(node, bool | int | str):
            return node
        if isinstance(node, float):
            return node if math.isfinite(node) else {"$float": repr(node)}
        if isinstance(node, list):
            return [walk(item, f"{path}.{i}") for i, item in enumerate(node)]
        if isinstance(node, tuple):
            return {"$tuple": [walk(item, f"{path}.{i}") for i, item in enumerate(node)]}
        if isinstance(node, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: walk(item, f"{path}.{key}" if path else key) for key, item in node.items()}
            return {"$dict": [[walk(k, path), walk(v, f"{path}.{k}" if path else str(k))] for k, v in node.items()]}
        raise CheckpointError(
            f"{where}: {path or 'it'} is a {type(node).__name__}, which a checkpoint cannot hold: only tensors, "
            "numbers, strings, lists, tuples and dicts can be loaded without running code. Keep it in one of those."
        )

    return walk(tree, ""), tensors


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give the memory that this rank has of a tensor: its shard, where it is a DTensor."""
    # Not by its class, whose import takes half a second that a process which only launches others can do without.
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def put_together(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo `take_apart`; in the place of a tensor comes what `tensors` has under its name."""
    if isinstance(skeleton, list):
        return [put_together(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (key, value), *_ = skeleton.items()
        if key == "$tensor":
            return tensors[value]
        if key == "$float":
            return float(value)
        if key == "$tuple":
            return tuple(put_together(item, tensors) for item in value)
        if key == "$dict":
            return {put_together(k, tensors): put_together(v, tensors) for k, v in value}
    return {key: put_together(value, tensors) for key, value in skeleton.items()}


def _store(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], names: dict[tuple[Any, ...], str]) -> str:
    """Remember a tensor under its path; a tied one is stored once."""
    here = local_of(tensor)
    # Not the address: a shard may be empty on one rank and not on another, and both must see what is tied.
    memory = (here.untyped_storage()._cdata, here.storage_offset())
    identity = (tensor.device, memory, tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and identity in names:
        return names[identity]
    name = path or "value"
    while name in tensors:  # "a.b" and "b" inside "a" have one path
        name += "'"
    names[identity] = name
    tensors[name] = tensor.detach() if tensor.requires_grad else tensor
    return name
