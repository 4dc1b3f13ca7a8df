"""How much memory a rank may take, and how much it has taken.

Ranks: all, each for itself; `agree_on_budget` is a collective.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path

import psutil
import torch

from instep.launch.resources import available_memory_bytes
from instep.world.device import accelerator_of
from instep.world.world import World

_SHARE = 0.9
"""Of what is available: other programs, and batches of other lengths, need some."""
_RESET = "5"
"""Written to clear_refs, it sets the peak of a process to what it has now."""


class MemoryGrowth:
    """Measures by how much the memory of this process, or of its device, grows."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator, self._device = accelerator_of(device), device
        self._begun_bytes = int(psutil.Process().memory_info().rss)

    def begin(self) -> None:
        """Release what the last probe has left, and begin to look for a new peak."""
        gc.collect()
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory(self._device)
        else:
            with contextlib.suppress(OSError):  # not on Linux: peaks then only grow, as sizes do
                Path("/proc/self/clear_refs").write_text(_RESET)

    def peak_bytes(self) -> int:
        """Return by how much memory has grown at its peak."""
        if self._accelerator is not None:
            return self._accelerator.peak_memory_bytes(self._device)
        return max(0, _peak_rss() - self._begun_bytes)


def _peak_rss() -> int:
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) << 10
    return int(psutil.Process().memory_info().rss)


def agree_on_budget(world: World) -> int | None:
    """Return by how much memory may grow on every rank; None on accelerators, which say when it is too much.

    Called on all ranks.
    """
    if accelerator_of(world.device) is not None:
        return None
    own = [int(_SHARE * available_memory_bytes() / world.place.local_world_size)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        own.append(limit - psutil.Process().memory_info().vms)
    return int(min(world.all_gather_object(min(own))))
