"""What travels between stages: activations, packed into rows of numbers of a fixed length.

PyTorch's stages exchange tensors of one shape in all microbatches. Ours may differ by a row, so each tensor travels
flat, in as many numbers as the largest microbatch needs; what is behind a smaller one's is zeros that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from instep.core.errors import TaskError


@dataclass(frozen=True)
class Form:
    """Shapes and types of the tensors that a stage gives to the next, for one microbatch."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_single: bool
    """Whether it is one tensor by itself, and no tuple."""

    @classmethod
    def of(cls, value: Any) -> Form:
        """Describe what a stage gives."""
        tensors = _tensors_of(value)
        if not is_passable(value):
            raise TaskError(
                f"a stage of the pipeline ends with {_word(value)}, which cannot be passed on: a floating-point tensor "
                "is needed, or a tuple of them. Cut the model elsewhere, by layers(model)."
            )
        dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
        return cls(tuple(tuple(t.shape) for t in tensors), dtypes, isinstance(value, torch.Tensor))

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Form:
        """Read what `to_json` gave."""
        shapes, dtypes, is_single = data
        return cls(tuple(tuple(shape) for shape in shapes), tuple(dtypes), bool(is_single))

    def to_json(self) -> list[Any]:
        """Give plain values."""
        return [self.shapes, self.dtypes, self.is_single]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each tensor has."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Make tensors to receive into."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in pairs]

    def tensors_of(self, value: Any) -> list[torch.Tensor]:
        """Give the tensors of a value of this form, to be sent."""
        return [tensor.contiguous() for tensor in _tensors_of(value)]

    def whole(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Give tensors in the form in which the stage gave them."""
        return tensors[0] if self.is_single else tuple(tensors)


def is_passable(value: Any) -> bool:
    """Tell whether a value can travel: floating-point tensors, one or a tuple of them."""
    tensors = _tensors_of(value)
    return bool(tensors) and all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors)


def pack(value: Any, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Make rows of given lengths of what a stage gives."""
    flats = [tensor.reshape(-1) for tensor in _tensors_of(value)]
    return tuple(
        flat if flat.numel() == length else F.pad(flat, (0, length - flat.numel()))
        for flat, length in zip(flats, lengths, strict=True)
    )


def unpack(rows: Sequence[torch.Tensor], form: Form) -> Any:
    """Give back what was packed."""
    pairs = zip(rows, form.sizes, form.shapes, strict=True)
    return form.whole([row[:size].view(shape) for row, size, shape in pairs])


def _tensors_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(value)
    return (value,)


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


_PLAIN = (bool, int, float, str, type(None))


def describe_output(output: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe a model's output as plain values, and collect its tensors."""
    if isinstance(output, torch.Tensor):
        tensors.append(output.contiguous())
        return {"tensor": [list(output.shape), str(output.dtype).removeprefix("torch.")]}
    if isinstance(output, dict) and type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: describe_output(item, tensors) for key, item in output.items()}}
    if type(output) in (tuple, list):
        return {type(output).__name__: [describe_output(item, tensors) for item in output]}
    if isinstance(output, _PLAIN):
        return {"plain": output}
    raise TaskError(
        f"the model gives a {type(output).__name__}, which cannot be told to the other ranks of a pipeline. Let it "
        "give tensors, or tuples, lists and dicts of them."
    )


def rebuild_output(described: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """Make an output of the form that was described, and collect its tensors, which are still to be filled."""
    ((kind, content),) = described.items()
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
