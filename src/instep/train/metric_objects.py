"""Metric objects: updated with batches, they compute their value in the end, as torchmetrics' are.

[Note: Metric objects]
What a metric object holds depends on the batches that it was updated with, and a rank has only some of them. So its
state is taken after each chunk, and it is reset. In the end the states of all chunks are merged in the order of the
chunks, as torchmetrics merges those of processes: each state by its own reduction. The chunks are the same at any world
size, so the merged state is, too. An object without `reset` that the Task keeps over batches adds them up in its own
way, which exact mode refuses.

Any object will do that has `update`, `compute` and tensors that can be added up; a torchmetrics Metric, or a module
that contains some, says itself which tensors it has and how they are merged.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.world.tensors import nested_tensors
from instep.world.world import World

State = dict[str, torch.Tensor | list[torch.Tensor]]
"""What a metric object holds, on CPU, by name; a list is one entry for each update."""


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric object."""
    return hasattr(value, "update") and hasattr(value, "compute")


def prepare_metrics(metrics: Iterable[Any], device: torch.device) -> None:
    """Move the metric objects among these to a device, and reset them."""
    for metric in filter(is_metric, metrics):
        if isinstance(metric, nn.Module):
            metric.to(device)
        if hasattr(metric, "reset"):
            metric.reset()


def state_of(metric: Any) -> State:
    """Return a copy of what a metric object holds."""
    return {
        key: [tensor.detach().to("cpu", copy=True) for tensor in value] if isinstance(value, list) else _wide(value)
        for key, (_, value) in _tensors(metric).items()
    }


def computed(name: str, metric: Any, states: list[State]) -> dict[str, float]:
    """Merge the states of all chunks, in their order, and return what a metric object like this computes from them."""
    # The Task may keep its own.
    whole: Any = copy.deepcopy(metric) if isinstance(metric, nn.Module) else copy.copy(metric)
    for key, (owner, like) in _tensors(whole).items():
        attribute, values = key.rpartition(".")[2], [state[key] for state in states]
        if isinstance(like, list):
            merged: Any = [tensor.to(_device_of(owner)) for tensors in values for tensor in tensors]
        else:
            stacked = torch.stack([value for value in values if isinstance(value, torch.Tensor)])
            reduce = getattr(owner, "_reductions", {}).get(attribute, _add_up)
            merged = (stacked if reduce is None else reduce(stacked)).to(like)
        setattr(owner, attribute, merged)
    for part in whole.modules() if isinstance(whole, nn.Module) else ():
        if hasattr(part, "_reductions"):  # it would look for other ranks, and for updates
            vars(part).update(sync_on_compute=False, _to_sync=False, _computed=None, _update_count=len(states))
    return dict(_numbers(name, whole.compute()))


def gather_states(states: list[State], world: World) -> list[State]:
    """Return the states of all ranks' chunks, in the order of the chunks. Called on all ranks."""
    described = [{key: _describe(value) for key, value in state.items()} for state in states]
    tensors = nested_tensors([list(state.values()) for state in states])
    # A clone: one element is contiguous whatever its stride, and then cannot be seen as bytes.
    raw = [t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in tensors if t.numel()]
    own = torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)
    by_rank = world.all_gather_object([described, own.numel()])
    padded = torch.zeros(max(size for _, size in by_rank), dtype=torch.uint8)
    padded[: own.numel()] = own
    buffers = [_Reader(part.cpu()) for part in world.all_gather(padded.to(world.device))]
    chunks = [[reader.state(entry) for entry in entries] for reader, (entries, _) in zip(buffers, by_rank, strict=True)]
    longest = max(map(len, chunks))
    return [own[number] for number in range(longest) for own in chunks if number < len(own)]  # c was rank c % size's


class _Reader:
    """Reads tensors from bytes, one after the other."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw, self._position = raw, 0

    def state(self, described: Mapping[str, Any]) -> State:
        return {key: self._value(value) for key, value in described.items()}

    def _value(self, described: list[Any]) -> Any:
        if not described or not isinstance(described[0], str):
            return [self._value(entry) for entry in described]
        dtype, shape = described
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        raw = self._raw[self._position : self._position + size].clone()
        self._position += size
        return raw.view(kind).reshape(shape)


def _describe(value: torch.Tensor | list[torch.Tensor]) -> list[Any]:
    if isinstance(value, list):
        return [_describe(entry) for entry in value]
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _tensors(metric: Any) -> dict[str, tuple[Any, Any]]:
    """Return the tensors, and lists of tensors, of a metric object by name, each with the object that has it."""
    if hasattr(metric, "compute_groups"):  # a collection, in which metrics share what they have in common:
        list(metric.values())  # this gives each of them its own
    modules = metric.named_modules() if isinstance(metric, nn.Module) else ()
    owned = [(path, part) for path, part in modules if hasattr(part, "_reductions")]
    if owned:
        return {f"{path}.{name}": (part, getattr(part, name)) for path, part in owned for name in part._reductions}
    return {name: (metric, value) for name, value in vars(metric).items() if isinstance(value, torch.Tensor)}


def _device_of(owner: Any) -> Any:
    return getattr(owner, "device", "cpu")


def _add_up(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.sum(0)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    # Always a copy: the object may continue to count in the same memory.
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield a computed value as numbers: itself, or `name/key` for each entry of a dict or of a vector."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(f"{name}/{key}", entry)
    elif isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() != 1:
        for key, entry in enumerate(value.tolist()):
            yield f"{name}/{key}", float(entry)
    elif isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        yield name, float(value)
    else:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TaskError(
            f"metric {name!r} computes {kind}; what can be logged and compared is a number, or a dict or vector of "
            "numbers."
        )
