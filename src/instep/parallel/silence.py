"""Parts of weight 0.

[Note: Silent parts]
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

from instep.parallel.scope import Scope


class _Silence(torch.autograd.Function):
    """The same for compiled code, which knows no hooks: it looks at a tensor when its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, silent: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(silent)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (silent,) = ctx.saved_tensors
        return torch.where(silent, 0.0, gradient), None


def silence_outputs(model: nn.Module, scope: Scope) -> None:
    """Let the model's output take no gradient in while the scope is silent."""

    def silence(gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if scope.silent else None

    def watch_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not scope.num_rows or not torch.is_grad_enabled():
            return output
        if torch.compiler.is_compiling():
            return tree_map_only(
                torch.Tensor, lambda t: _Silence.apply(t, scope.silence) if t.requires_grad else t, output
            )
        tree_map_only(torch.Tensor, lambda t: t.register_hook(silence) if t.requires_grad else None, output)
        return output

    model.register_forward_hook(watch_output)
