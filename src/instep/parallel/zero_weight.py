"""Parts of weight 0.

[Note: Parts of weight 0]
A part whose weight is 0 must contribute nothing, even if its mean is 0/0 and its gradient NaN. Where no
layer connects the ranks, its gradients are simply thrown away. Synchronised BatchNorm does connect them: the
other ranks' losses depend on this rank's rows through the statistics, so its backward pass must run, and
carry those terms to the layers below. What is taken out is the part's own gradient, where it enters the
model: at the output, it is replaced by zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from instep.parallel.batch_context import BatchContext


class _ZeroGradient(torch.autograd.Function):
    """The same for compiled code, which knows no hooks: it looks at a tensor when its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, is_zero: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(is_zero)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (is_zero,) = ctx.saved_tensors
        return torch.where(is_zero, 0.0, gradient), None


def zero_gradient_of_outputs(model: nn.Module, context: BatchContext) -> None:
    """Let the model's output take no gradient in while this part has weight 0."""

    def zero_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if context.has_zero_weight else None

    def watch_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not context.num_rows or not torch.is_grad_enabled():
            return output
        if torch.compiler.is_compiling():
            flag = context.zero_weight_flag
            return tree_map_only(torch.Tensor, lambda t: _ZeroGradient.apply(t, flag) if t.requires_grad else t, output)
        tree_map_only(torch.Tensor, lambda t: t.register_hook(zero_gradient) if t.requires_grad else None, output)
        return output

    model.register_forward_hook(watch_output)
