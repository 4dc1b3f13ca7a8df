"""Recognise what an object that is saved consists of: weights, states of optimizers, schedules, progress.

Ranks: each its own.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PROGRESS = re.compile(r"epoch|step|iter", re.IGNORECASE)
_GENERATOR = re.compile(r"rng|random|generator", re.IGNORECASE)
_DEPTH = 5
"""Levels of dicts, lists and tuples that are looked at."""


def parts_in(obj: Any, name: str = "", depth: int = _DEPTH) -> set[str]:
    """Return which parts an object holds: model, optimizer, scheduler, scaler, progress, generator."""
    if (part := _part(obj, name)) is not None:
        return {part}
    parts: set[str] = set()
    if depth and isinstance(obj, Mapping):
        for key, value in obj.items():
            parts |= parts_in(value, str(key), depth - 1)
    elif depth and isinstance(obj, list | tuple) and len(obj) < 100:
        for value in obj:
            parts |= parts_in(value, name, depth - 1)
    return parts


def _part(obj: Any, name: str) -> str | None:
    if isinstance(obj, torch.nn.Module):
        return "model"
    if isinstance(obj, Mapping) and (part := _state_dict(obj)) is not None:
        return part
    if _GENERATOR.search(name):
        return "generator"
    if isinstance(obj, Mapping):
        return None
    is_number = isinstance(obj, int) or (isinstance(obj, torch.Tensor) and obj.numel() == 1)
    return "progress" if is_number and _PROGRESS.search(name) else None


def _state_dict(state: Mapping[Any, Any]) -> str | None:
    keys = set(state)
    if {"state", "param_groups"} <= keys:
        return "optimizer"
    if "last_epoch" in keys or "_step_count" in keys or "num_bad_epochs" in keys:
        return "scheduler"
    if {"scale", "growth_factor"} <= keys:
        return "scaler"
    values = list(state.values())
    if keys <= {"cpu", "cuda", "torch", "numpy", "python"}:  # states of generators
        return None
    return "model" if values and all(isinstance(value, torch.Tensor) for value in values) else None


def devices_in(obj: Any, depth: int = _DEPTH) -> set[str]:
    """Return the devices of the tensors in an object."""
    return {str(tensor.device) for tensor in _tensors(obj, depth)}


def shards_in(obj: Any, depth: int = _DEPTH) -> int:
    """Return over how many ranks the DTensors in an object are divided; 1: there are none, or each rank has all."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:  # nothing has made a DTensor
        return 1
    sharded = (tensor for tensor in _tensors(obj, depth) if isinstance(tensor, tensors.DTensor))
    return max((_num_shards(tensor) for tensor in sharded), default=1)


def plain_shards_in(obj: Any, model: torch.nn.Module) -> int:
    """Return over how many ranks a model is divided whose local parts an object holds by name, as plain tensors."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return 1
    saved = dict(_named(obj, _DEPTH))
    counts = [1]
    for name, parameter in model.named_parameters():
        part = saved.get(name)
        if part is not None and isinstance(parameter, tensors.DTensor) and not isinstance(part, tensors.DTensor):
            is_part = part.shape == parameter.to_local().shape and part.shape != parameter.shape
            counts.append(_num_shards(parameter) if is_part else 1)
    return max(counts)


def _named(obj: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in obj.items() if isinstance(obj, Mapping) else ():
        if isinstance(value, torch.Tensor):
            yield str(key), value
        elif depth and isinstance(value, Mapping):
            yield from _named(value, depth - 1)


def _num_shards(tensor: Any) -> int:
    mesh = tensor.device_mesh
    sizes = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    return math.prod(sizes)


def _tensors(obj: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield obj
    elif depth and isinstance(obj, Mapping):
        for value in obj.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(obj, list | tuple):
        for value in obj:
            yield from _tensors(value, depth - 1)
