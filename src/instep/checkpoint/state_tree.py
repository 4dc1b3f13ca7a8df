"""Flatten a state_dict into tensors and a JSON skeleton, and unflatten it again.

[Note: State trees]
A state_dict is a tree of dicts, lists, tuples, numbers, strings and tensors. The tensors go into a safetensors file
under the paths that they have in the tree, the rest into a JSON skeleton in which `{"$tensor": name}` stands for a
tensor. JSON has neither tuples, nor keys that are not strings, nor infinities; those are written as objects whose only
key begins with `$`. Anything else is refused by name: a pickle would run code when it is loaded.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from instep.core.errors import CheckpointError
from instep.core.plural import plural


def flatten_state(tree: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the skeleton and the tensors of a state; the tensors are not copied. Errors name it `where`."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, numpy.generic):
            node = node.item()
        if isinstance(node, torch.Tensor):
            return {"$tensor": _add_tensor(node, path, tensors, names)}
        if node is None or isinstance(node, bool | int | str):
            return node
        if isinstance(node, float):
            return node if math.isfinite(node) else {"$float": repr(node)}
        if isinstance(node, list | tuple):
            items = [walk(item, f"{path}.{i}") for i, item in enumerate(node)]
            return items if isinstance(node, list) else {"$tuple": items}
        if isinstance(node, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: walk(item, f"{path}.{key}" if path else key) for key, item in node.items()}
            return {"$dict": [[walk(k, path), walk(v, f"{path}.{k}" if path else str(k))] for k, v in node.items()]}
        raise CheckpointError(
            f"{where}: {path or 'it'} is a {type(node).__name__}, which a checkpoint cannot hold: only tensors, "
            "numbers, strings, lists, tuples and dicts can be loaded without running code. Keep it in one of those."
        )

    return walk(tree, ""), tensors


def unflatten_state(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state of a skeleton, with the values of `tensors` in place of the tensors."""
    if isinstance(skeleton, list):
        return [unflatten_state(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (key, value), *_ = skeleton.items()
        if key == "$tensor":
            return tensors[value]
        if key == "$float":
            return float(value)
        if key == "$tuple":
            return tuple(unflatten_state(item, tensors) for item in value)
        if key == "$dict":
            return {unflatten_state(k, tensors): unflatten_state(v, tensors) for k, v in value}
    return {key: unflatten_state(value, tensors) for key, value in skeleton.items()}


def find_other_type(saved: Any, fresh: Any, where: str = "") -> str:
    """Return in words where a saved state has values of another type, or lists of another length, than a fresh one.

    Empty if nowhere. A value that is None in the fresh one may become anything, and keys may come and go.
    """
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        pairs = [(key, saved[key], fresh[key]) for key in fresh if key in saved]
    elif isinstance(fresh, list | tuple) and isinstance(saved, list | tuple):
        if len(saved) != len(fresh):
            return f"{where.strip('.')} has {plural(len(saved), 'value')}, and had {len(fresh)}"
        pairs = [(number, *both) for number, both in enumerate(zip(saved, fresh, strict=False))]
    else:
        kinds = ((int, float, torch.Tensor), (str,), (Mapping,), (list, tuple))
        expected = next((kind for kind in kinds if isinstance(fresh, kind)), None)
        is_same = expected is None or isinstance(saved, expected)
        return "" if is_same else f"{where.strip('.')} is {saved!r:.40}, and was a {type(fresh).__name__}"
    return next(filter(None, (find_other_type(old, new, f"{where}.{key}") for key, old, new in pairs)), "")


def merge_skeletons(first: Any, second: Any) -> Any:
    """Return the first rank's skeleton with what only the second has: each pipeline stage knows its own names.

    Dicts are joined; if both have a key, the first rank's value is used. Lists of names are joined, and other lists (an
    optimizer's parameter groups) are merged item by item.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() == {"$dict"} == second.keys():
            return {"$dict": _merge_pairs(first["$dict"], second["$dict"])}
        if _is_special(first) or _is_special(second):
            return first
        return {
            key: merge_skeletons(first[key], value) if key in first and key in second else value
            for key, value in {**first, **second}.items()
        }
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(item, str) for item in [*first, *second]):
            return [*first, *(name for name in second if name not in set(first))]
        both = [merge_skeletons(a, b) for a, b in zip(first, second, strict=False)]
        return [*both, *first[len(both) :], *second[len(both) :]]
    return first


def _merge_pairs(first: list[Any], second: list[Any]) -> list[Any]:
    """Merge the pairs of two dicts whose keys are not strings."""
    keyed = [{json.dumps(key): (key, value) for key, value in pairs} for pairs in (first, second)]
    values = merge_skeletons(*({text: value for text, (_, value) in pairs.items()} for pairs in keyed))
    keys = keyed[1] | keyed[0]
    return [[keys[text][0], value] for text, value in values.items()]


def _is_special(node: dict[str, Any]) -> bool:
    """Return whether a dict stands for a value that JSON cannot express."""
    return len(node) == 1 and next(iter(node)) in ("$tensor", "$float", "$tuple")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    # Not isinstance: importing DTensor takes half a second, which a process that only launches others can save.
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _add_tensor(
    tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], names: dict[tuple[Any, ...], str]
) -> str:
    """Add a tensor under its path, and return its name; a tied one is added once, a sparse one is stored dense."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    local = local_tensor(tensor)
    # Not the address: a shard may be empty on one rank only, and all ranks must see the same ties.
    memory = (local.untyped_storage()._cdata, local.storage_offset())
    identity = (tensor.device, memory, tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and identity in names:
        return names[identity]
    name = path or "value"
    while name in tensors:  # "a.b" and "b" inside "a" have the same path
        name += "'"
    names[identity] = name
    tensors[name] = tensor.detach() if tensor.requires_grad else tensor
    return name
