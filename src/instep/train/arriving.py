"""Numbers on their way from a device to the host.

[Note: Reading the loss]
A step's loss is known after its forward pass, and the host needs it before the update. If it were read there, the host
would wait for the whole backward pass, and the GPU, with nothing queued, for the host. So the loss is copied to the
host before the backward pass is queued: it arrives while the GPU still works, and the host stays ahead.
"""

import torch

from instep.world.device import has_streams, wide_dtype


class ArrivingNumbers:
    """Numbers on their way to the host ([Note: Reading the loss])."""

    def __init__(self, numbers: list[torch.Tensor]) -> None:
        row = torch.stack([number.reshape(()).to(wide_dtype(number.device)) for number in numbers])
        self._event = None
        if not has_streams(row.device):
            self._host = row.cpu()
            return
        self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._host.copy_(row, non_blocking=True)
        self._event = torch.get_device_module(row.device).Event()
        self._event.record()

    def tolist(self) -> list[float]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return list(self._host.tolist())
