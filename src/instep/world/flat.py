"""Tensors of any shape and stride as rows of numbers or bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def flattened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give a tensor's numbers as one contiguous row, and bring back what was done to them.

    A subclass may say that it is contiguous and have its numbers elsewhere; what is given is always plain.
    """
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        flat = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        yield flat.view(-1)
        tensor.copy_(flat)
    elif tensor.is_contiguous():
        yield tensor.view(-1)
    else:
        flat = tensor.contiguous().view(-1)
        yield flat
        tensor.copy_(flat.view(tensor.shape))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """See numbers of any dtype as bytes; what is only copied need not be understood."""
    return flat.view(torch.uint8)
