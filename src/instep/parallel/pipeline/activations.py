"""What stages send to each other: activations, in flat buffers of a fixed length.

PyTorch's stages exchange tensors of one shape in all microbatches. instep's microbatches may differ by a row, so each
tensor is sent flat, in a buffer of the size that the largest microbatch needs; a smaller one is padded with zeros,
which are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from instep.core.errors import TaskError


@dataclass(frozen=True)
class ActivationMeta:
    """Shapes and dtypes of the tensors that a stage sends to the next, for one microbatch."""

    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[str]
    is_single: bool
    """Whether it is one tensor, and no tuple."""

    @classmethod
    def of(cls, value: Any) -> ActivationMeta:
        """Describe a stage's output; raise if it cannot be sent."""
        if not is_sendable(value):
            what = f"a tensor of {_dtype(value)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TaskError(
                f"a stage of the pipeline ends with {what}, which cannot be sent to the next: it must be a "
                "floating-point tensor, or a tuple of them. Split the model elsewhere, by layers(model)."
            )
        tensors = tensors_of(value)
        shapes = tuple(tuple(t.shape) for t in tensors)
        return cls(shapes, tuple(_dtype(t) for t in tensors), isinstance(value, torch.Tensor))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each tensor."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors to receive into."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in pairs]

    def assemble(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return tensors as the stage's output: one, or a tuple."""
        return tensors[0] if self.is_single else tuple(tensors)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensors_of(value: Any) -> tuple[Any, ...]:
    """Return the tensors of a stage's output."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_sendable(value: Any) -> bool:
    """Return whether a stage may send a value: a floating-point tensor, or a tuple of them."""
    tensors = tensors_of(value)
    return bool(tensors) and all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors)


def pack(value: Any, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return a stage's output as flat buffers of given lengths."""
    flats = [tensor.reshape(-1) for tensor in tensors_of(value)]
    return tuple(
        flat if flat.numel() == length else F.pad(flat, (0, length - flat.numel()))
        for flat, length in zip(flats, lengths, strict=True)
    )


def unpack(buffers: Sequence[torch.Tensor], meta: ActivationMeta) -> Any:
    """Return the output that was packed."""
    triples = zip(buffers, meta.sizes, meta.shapes, strict=True)
    return meta.assemble([buffer[:size].view(tuple(shape)) for buffer, size, shape in triples])


_PLAIN = (bool, int, float, str, type(None))


def describe_output(output: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the structure of a model's output as plain values, and append its tensors to `tensors`."""
    if isinstance(output, torch.Tensor):
        tensors.append(output.contiguous())
        return {"tensor": [list(output.shape), _dtype(output)]}
    if isinstance(output, dict) and type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: describe_output(item, tensors) for key, item in output.items()}}
    if type(output) in (tuple, list):
        return {type(output).__name__: [describe_output(item, tensors) for item in output]}
    if isinstance(output, _PLAIN):
        return {"plain": output}
    raise TaskError(
        f"the model returns a {type(output).__name__}, which cannot be sent to the other ranks of a pipeline. Let it "
        "return tensors, or tuples, lists and dicts of them."
    )


def rebuild_output(structure: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """Return an output of the described structure with empty tensors, and append these to `tensors`."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        shape, dtype = content
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        return tensors[-1]
    if kind == "dict":
        return {key: rebuild_output(item, device, tensors) for key, item in content.items()}
    if kind == "plain":
        return content
    items = [rebuild_output(item, device, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
