"""Whether a split model still gives the answer of the whole one: outputs and gradients for the same few rows.

Ranks: all of a team, alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from instep.parallel.capture import Call
from instep.parallel.preserve import evaluating
from instep.world.whole import whole_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By dtype: how far a tensor may be off, in the norm. A wrong plan is off by much more."""
_ROUGHLY = 0.1


@dataclass
class Answer:
    """What a model gives for a call."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def answer_of(model: nn.Module, call: Call, with_gradients: bool = True) -> Answer:
    """Call a model in eval mode, and leave nothing behind in it."""
    # With gradients enabled in any case: without, some of torch's modules take a shortcut that training never takes.
    with _undisturbed(model), torch.enable_grad():
        outputs = [leaf for leaf in _leaves(model(*call.positional, **call.named)) if leaf.is_floating_point()]
        answer = Answer([leaf.detach() for leaf in outputs])
        through = [leaf for leaf in outputs if leaf.requires_grad]
        if not with_gradients or not through:
            return answer
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        weights = [torch.cos(torch.arange(leaf.numel(), device=leaf.device)).to(leaf).view_as(leaf) for leaf in through]
        found = torch.autograd.grad(through, [p for _, p in named], weights, allow_unused=True)
        answer.gradients = {
            name: whole_of(grad).detach() for (name, _), grad in zip(named, found, strict=True) if grad is not None
        }
    return answer


def difference(expected: Answer, found: Answer) -> str:
    """Say in what two answers differ by more than rounding; empty: in nothing."""
    if [t.shape for t in expected.outputs] != [t.shape for t in found.outputs]:
        return "its outputs have other shapes"
    for number, (a, b) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        if off := _off(a, b, 0.0):
            return f"output {number} is off by {off:.2g} of its size"
    if set(expected.gradients) != set(found.gradients):
        odd = sorted(set(expected.gradients) ^ set(found.gradients))
        return f"{odd[0]} has a gradient in one of them only"
    largest = max((float(grad.norm()) for grad in expected.gradients.values()), default=0.0)
    for name, grad in expected.gradients.items():
        if off := _off(grad, found.gradients[name], largest):
            return f"the gradient of {name} is off by {off:.2g} of its size"
    return ""


def _off(expected: torch.Tensor, found: torch.Tensor, largest: float) -> float:
    """How far one tensor is from the other, relative to its norm; 0 within rounding."""
    if expected.shape != found.shape:
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    a, b = (torch.where(finite, t, 0).double() for t in (expected, found))
    # What is next to nothing beside the other gradients is rounding itself.
    size = max(float(a.norm()), 1e-3 * largest, 1e-30)
    off = float((a - b).norm()) / size
    return off if off > _TOLERANCE.get(expected.dtype, _ROUGHLY) else 0.0


def _leaves(output: Any) -> list[torch.Tensor]:
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            found += [value for value in vars(leaf).values() if isinstance(value, torch.Tensor)]
    return found


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Keep modes, buffers, generators and precision as they are."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with evaluating(model), torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
