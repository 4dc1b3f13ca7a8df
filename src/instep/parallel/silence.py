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


def silence_outputs(model: nn.Module, scope: Scope) -> None:
    """Let the model's output take no gradient in while the scope is silent."""
    scope.connected = True

    def silence(gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if scope.silent else None

    def watch_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if scope.num_rows and torch.is_grad_enabled():
            tree_map_only(torch.Tensor, lambda t: t.register_hook(silence) if t.requires_grad else None, output)

    model.register_forward_hook(watch_output)
