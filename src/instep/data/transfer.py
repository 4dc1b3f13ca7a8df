"""The way of batches to the device.

Ranks: all, each to its own device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from instep.data.nested import map_tensors
from instep.world.device import has_streams
from instep.world.tensors import nested_tensors


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Bring batches to the device; on the CPU they are there already."""
    if device.type == "cpu":
        return batches
    if has_streams(device):
        return CopyAhead(device).batches(batches)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


class CopyAhead:
    """Copies each batch to a GPU before the one ahead of it is used, on a stream of its own.

    So a batch is on its way while the step before it computes, even when that step waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out the batches one after the other, on the device."""
        coming: tuple[Any, torch.Event] | None = None
        for batch in batches:
            after = self._start(batch)
            if coming is not None:
                yield self._arrived(*coming)
            coming = after
        if coming is not None:
            yield self._arrived(*coming)

    def _start(self, batch: Any) -> tuple[Any, torch.Event]:
        with self._module.stream(self._stream):
            copied = map_tensors(self._copy, batch)
            return copied, self._stream.record_event()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # From pageable memory a copy would wait for the stream. The pinned buffer may be forgotten at once:
        # torch's host allocator keeps it until the stream has passed the copy.
        on_host = tensor.device.type == "cpu"
        return (tensor.pin_memory() if on_host else tensor).to(self._device, non_blocking=True)

    def _arrived(self, batch: Any, event: torch.Event) -> Any:
        current = self._module.current_stream(self._device)
        current.wait_event(event)
        for tensor in nested_tensors(batch):
            # Its memory belongs to the copying stream, which must not reuse it while this one may read it.
            tensor.record_stream(current)
        return batch
