"""The fused form of an optimizer: one kernel for all parameters, where its user left that open.

A checkpoint holds an optimizer's settings beside its state, and fused optimizers keep their count of steps on the
device; so what was chosen here is set again after every restore.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from instep.world.device import dispatch_key_of

_KERNELS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "_fused_adam_",
    torch.optim.AdamW: "_fused_adamw_",
    torch.optim.SGD: "_fused_sgd_",
    torch.optim.Adagrad: "_fused_adagrad_",
}

_FOR_PIECES = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose kernel PyTorch knows how to use on tensors that are spread."""


def may_choose(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the user left open in which form the optimizer works; a subclass has a form of its own."""
    return type(optimizer) in _KERNELS and all(
        group.get("fused") is None and group.get("foreach") is None for group in optimizer.param_groups
    )


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the fused form is right for all parameters."""
    kernel = f"aten::{_KERNELS[type(optimizer)]}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if len(meshes) > 1 or (None not in meshes and type(optimizer) not in _FOR_PIECES):
        return False  # one kernel takes plain tensors, or pieces of one mesh
    for group in optimizer.param_groups:
        if group.get("differentiable") or isinstance(group["lr"], torch.Tensor):
            return False
        if group.get("momentum"):  # fused SGD fails for a parameter that is first used after the first step
            return False
        for p in group["params"]:
            if not p.is_floating_point() or p.is_sparse:
                return False
            key = dispatch_key_of(p.device)
            if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(kernel, key):
                return False
    return True


def has_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether there is a gradient that no fused form takes."""
    return any(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"])


def set_fused(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Switch the fused form on or off, and bring the count of steps to where that form wants it."""
    optimizer.defaults["fused"] = fused or None
    for group in optimizer.param_groups:
        group["fused"] = fused or None
        for p in group["params"]:
            count = optimizer.state[p].get("step") if p in optimizer.state else None
            if isinstance(count, torch.Tensor):
                optimizer.state[p]["step"] = count.to(p.device, torch.float32) if fused else count.cpu()
