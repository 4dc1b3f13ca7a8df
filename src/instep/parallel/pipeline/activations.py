"""What stages send to each other: activations, in flat buffers of a fixed length.

PyTorch's stages exchange tensors of one shape in all microbatches. instep's microbatches may differ by a row, so each
tensor is sent flat, in a buffer of the size that the largest microbatch needs; a smaller one is padded with zeros,
which are not read.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from instep.core.errors import TaskError

ActivationMeta = torch.Tensor | tuple[torch.Tensor, ...]
"""What a stage sends to the next for one microbatch, on the meta device: shapes and dtypes without values."""
BufferSpec = tuple[tuple[int, torch.dtype], ...]
"""Lengths and dtypes of the flat buffers that one stage sends to the next."""


def tensors_of(value: Any) -> tuple[Any, ...]:
    """Return the tensors of a stage's output."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_sendable(value: Any) -> bool:
    """Return whether a stage may send a value: a floating-point tensor, or a tuple of them."""
    tensors = tensors_of(value)
    return bool(tensors) and all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors)


def check_sendable(value: Any) -> None:
    """Raise if a stage's output cannot be sent to the next."""
    if not is_sendable(value):
        what = f"a tensor of {_dtype(value)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise TaskError(
            f"a stage of the pipeline ends with {what}, which cannot be sent to the next: it must be a "
            "floating-point tensor, or a tuple of them. Split the model elsewhere, by layers(model)."
        )


def pack(value: Any, buffers: BufferSpec) -> list[torch.Tensor]:
    """Return a stage's output as flat buffers."""
    flats = [tensor.reshape(-1) for tensor in tensors_of(value)]
    return [
        flat if flat.numel() == length else F.pad(flat, (0, length - flat.numel()))
        for flat, (length, _) in zip(flats, buffers, strict=True)
    ]


def unpack(buffers: Sequence[torch.Tensor], meta: ActivationMeta) -> Any:
    """Return the output that was packed."""
    flats = iter(buffers)
    return tree_map(lambda like: next(flats)[: like.numel()].view(like.shape), meta)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe_output(output: Any) -> Any:
    """Return the structure of an output as plain values, with the shapes and dtypes of its tensors."""
    if isinstance(output, torch.Tensor):
        return {"tensor": [list(output.shape), _dtype(output)]}
    if type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: describe_output(item) for key, item in output.items()}}
    if type(output) in (tuple, list):
        return {type(output).__name__: [describe_output(item) for item in output]}
    if output is None or isinstance(output, bool | int | float | str):
        return {"plain": output}
    raise TaskError(
        f"the model returns a {type(output).__name__}, which cannot be sent to the other ranks of a pipeline. Let it "
        "return tensors, or tuples, lists and dicts of them."
    )


def rebuild_output(structure: Any, device: torch.device) -> Any:
    """Return an output of the described structure, with empty tensors."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        shape, dtype = content
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if kind == "dict":
        return {key: rebuild_output(item, device) for key, item in content.items()}
    if kind == "plain":
        return content
    items = [rebuild_output(item, device) for item in content]
    return tuple(items) if kind == "tuple" else items
