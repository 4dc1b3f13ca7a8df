"""The most memory that this process has needed so far."""

import resource
import sys

import torch

from instep.events.schema import MemoryRecord
from instep.world.device import accelerator_of

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Of `ru_maxrss`, in bytes."""
_WORTH_LOGGING = 1.02
"""By how much a peak has grown since it was recorded."""


class PeakMemory:
    """Watches the peaks of one process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._accelerator = device, accelerator_of(device)
        self._logged = (0, 0)

    def new_peak(self, step: int) -> MemoryRecord | None:
        """Return the peaks if one has grown since they were returned last. A few microseconds, and no device waits."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
        device = 0 if self._accelerator is None else self._accelerator.peak_memory_bytes(self._device)
        if host <= self._logged[0] * _WORTH_LOGGING and device <= self._logged[1] * _WORTH_LOGGING:
            return None
        self._logged = (host, device)
        return MemoryRecord(step=step, host_bytes=host, device_bytes=device or None)
