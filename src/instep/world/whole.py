"""A tensor that ranks share, gathered on each of them.

Ranks: all that share it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from instep.world.device import accelerator_of


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give the whole of a tensor, with a gradient that finds its way back. Called on all ranks that share it.

    Over gloo it goes through the host's memory: torch's own gathering of tensors on a GPU crashes there.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    accelerator = accelerator_of(tensor.device)
    if accelerator is None or dist.get_backend(tensor.device_mesh.get_group(0)) == accelerator.backend:
        return tensor.full_tensor()
    there = cast(DTensor, tensor.cpu())
    return there.full_tensor().to(tensor.device)
