"""Copy batches to the device.

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
    """Yield the batches on the device; for the CPU, return them unchanged."""
    if device.type == "cpu":
        return batches
    if has_streams(device):
        return CopyAhead(device).batches(batches)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


class CopyAhead:
    """Copies each batch to a GPU before the previous one is used, on a stream of its own.

    So a batch is copied while the previous step computes, even if that step waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches in order, on the device."""
        pending: tuple[Any, torch.Event] | None = None
        for batch in batches:
            started = self._start(batch)
            if pending is not None:
                yield self._arrived(*pending)
            pending = started
        if pending is not None:
            yield self._arrived(*pending)

    def _start(self, batch: Any) -> tuple[Any, torch.Event]:
        with self._module.stream(self._stream):
            copied = map_tensors(self._copy, batch)
            return copied, self._stream.record_event()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy from pageable memory would wait for the stream. No reference to the pinned buffer is needed:
        # torch's host allocator keeps it until the stream has passed the copy.
        on_host = tensor.device.type == "cpu"
        return (tensor.pin_memory() if on_host else tensor).to(self._device, non_blocking=True)

    def _arrived(self, batch: Any, event: torch.Event) -> Any:
        current = self._module.current_stream(self._device)
        current.wait_event(event)
        for tensor in nested_tensors(batch):
            # Its memory belongs to the copy stream, which must not reuse it while this stream may read it.
            tensor.record_stream(current)
        return batch
