"""Parts of weight 0: their backward pass runs, and contributes nothing.

[Note: Parts of weight 0]
A part of weight 0 must contribute nothing, even if its mean is 0/0 and its gradient NaN. If no layer communicates, its
gradients are dropped. A synchronised BatchNorm does communicate: the other ranks' losses depend on this rank's rows
through the statistics, so the backward pass of the part must run, and propagate those terms to the layers below. Only
the part's own gradient is removed: at the model's output, where it enters, it is replaced by zeros.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from instep.parallel.batch_context import BatchContext


class _ZeroGradient(torch.autograd.Function):
    """Zeroes a gradient in compiled code, which runs no tensor hooks: a flag is read when backward runs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, is_zero: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(is_zero)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (is_zero,) = ctx.saved_tensors
        return torch.where(is_zero, 0.0, gradient), None


def zero_gradient_of_outputs(model: nn.Module, context: BatchContext) -> None:
    """Replace the gradient of a model's output by zeros while the part has weight 0."""

    def zero_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if context.has_zero_weight else None

    def register_zeroing(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not context.num_rows or not torch.is_grad_enabled():
            return output
        if torch.compiler.is_compiling():
            flag = context.zero_weight_flag
            return tree_map_only(torch.Tensor, lambda t: _ZeroGradient.apply(t, flag) if t.requires_grad else t, output)
        tree_map_only(torch.Tensor, lambda t: t.register_hook(zero_gradient) if t.requires_grad else None, output)
        return output

    model.register_forward_hook(register_zeroing)
