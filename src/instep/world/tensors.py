"""Tensors as communication needs them: found in nested values, as one contiguous row, gathered from all ranks."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from instep.world.device import accelerator_of


def nested_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside dicts, tuples, lists and dataclasses, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from nested_tensors(value)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from nested_tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from nested_tensors(getattr(tree, field.name))


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, differentiably. Called on all ranks that share it.

    Over gloo it goes through the host's memory: torch's own gathering of tensors on a GPU crashes there.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    accelerator = accelerator_of(tensor.device)
    if accelerator is None or dist.get_backend(tensor.device_mesh.get_group(0)) == accelerator.backend:
        return tensor.full_tensor()
    on_host = cast(DTensor, tensor.cpu())
    return on_host.full_tensor().to(tensor.device)


@contextlib.contextmanager
def flattened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements as one contiguous row, and write changes to it back to the tensor.

    A subclass may report that it is contiguous and hold its elements elsewhere; the row is always a plain tensor.
    """
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.is_contiguous():
        yield tensor.view(-1)
        return
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    yield copy.view(-1)
    tensor.copy_(copy)


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as one contiguous row, to be read only."""
    return tensor.detach().contiguous().view(-1)


def row_on(numbers: Sequence[float | torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers as one row on a device, of which some may be there already: nothing waits for those."""
    row = torch.tensor([0.0 if isinstance(value, torch.Tensor) else value for value in numbers], dtype=dtype).to(device)
    for i, value in enumerate(numbers):
        if isinstance(value, torch.Tensor):
            row[i] = value
    return row


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """View elements of any dtype as bytes: what is only copied need not be understood."""
    return flat.view(torch.uint8)
