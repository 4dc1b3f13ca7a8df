"""Check that a split model computes what the whole one computes: outputs and gradients for the same few rows.

Ranks: all of a group, alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from instep.parallel.capture import Call
from instep.parallel.preserve import evaluating
from instep.world.tensors import whole_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By dtype: the relative error that a tensor may have, in the norm. A wrong plan has a much larger one."""
_LOW_PRECISION_TOLERANCE = 0.1


@dataclass
class Answer:
    """A model's outputs and gradients for a call."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def answer_of(model: nn.Module, call: Call, with_gradients: bool = True) -> Answer:
    """Call a model in eval mode, and restore its state, the generators and the matmul precision."""
    # Gradients are enabled in any case: without them, some of torch's modules take a shortcut that training never
    # takes.
    with evaluating(model), torch.enable_grad(), _reproducible():
        outputs = [leaf for leaf in _leaves(model(*call.positional, **call.named)) if leaf.is_floating_point()]
        answer = Answer([leaf.detach() for leaf in outputs])
        differentiable = [leaf for leaf in outputs if leaf.requires_grad]
        if not with_gradients or not differentiable:
            return answer
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        weights = [torch.cos(torch.arange(x.numel(), device=x.device)).to(x).view_as(x) for x in differentiable]
        grads = torch.autograd.grad(differentiable, [p for _, p in named], weights, allow_unused=True)
        answer.gradients = {
            name: whole_of(grad).detach() for (name, _), grad in zip(named, grads, strict=True) if grad is not None
        }
    return answer


def difference(expected: Answer, actual: Answer) -> str:
    """Return a sentence about the first difference beyond rounding; empty: there is none."""
    if [t.shape for t in expected.outputs] != [t.shape for t in actual.outputs]:
        return "its outputs have other shapes"
    for number, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if off := _error(a, b, 0.0):
            return f"output {number} is off by {off:.2g} of its size"
    if set(expected.gradients) != set(actual.gradients):
        odd = sorted(set(expected.gradients) ^ set(actual.gradients))
        return f"{odd[0]} has a gradient in one of them only"
    largest = max((float(grad.norm()) for grad in expected.gradients.values()), default=0.0)
    for name, grad in expected.gradients.items():
        if off := _error(grad, actual.gradients[name], largest):
            return f"the gradient of {name} is off by {off:.2g} of its size"
    return ""


def _error(expected: torch.Tensor, actual: torch.Tensor, largest: float) -> float:
    """Return the error relative to the expected norm; 0 within rounding."""
    finite = expected.isfinite()
    if expected.shape != actual.shape or not torch.equal(finite, actual.isfinite()):
        return float("inf")
    a, b = (torch.where(finite, t, 0).double() for t in (expected, actual))
    # A gradient that is tiny beside the others is rounding error itself.
    size = max(float(a.norm()), 1e-3 * largest, 1e-30)
    off = float((a - b).norm()) / size
    return off if off > _TOLERANCE.get(expected.dtype, _LOW_PRECISION_TOLERANCE) else 0.0


def _leaves(output: Any) -> list[torch.Tensor]:
    tensors = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            tensors += [value for value in vars(leaf).values() if isinstance(value, torch.Tensor)]
    return tensors


@contextmanager
def _reproducible() -> Iterator[None]:
    """Set the seed and the highest matmul precision; restore both afterwards."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
