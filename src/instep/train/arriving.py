"""A number on its way from a GPU, sent before the work that follows it.

[Note: Reading the loss]
A step's loss is known after its forward pass, and the host wants it before the update. Read where it is wanted, it
would have the host wait for the whole backward pass, and the GPU for the host, which then has nothing queued. So it is
copied to the host before the backward pass is queued: it arrives while the GPU still works, and the host stays ahead.
"""

from __future__ import annotations

import torch


class Arriving:
    """A number on its way to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
        self._host.copy_(number.reshape(()), non_blocking=True)
        self._event = torch.get_device_module(number.device).Event()
        self._event.record()

    def __float__(self) -> float:
        self._event.synchronize()
        return float(self._host)
