"""Copy a state into host memory, fast: training waits for this when it saves.

The memory is reused from one snapshot to the next. Fresh pages cost more than the copy itself (measured: 2.3 GB/s into
new memory, 6.1 into memory that was used before), and pinning them for a GPU far more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from instep.checkpoint.save_plan import Key, Piece
from instep.checkpoint.state_tree import flatten_state, local_tensor
from instep.checkpoint.writer import dtype_name
from instep.world.device import has_streams

Share = Mapping[Key, Piece]
"""What one of several ranks writes of a state, and where."""


class FlatState(NamedTuple):
    """A flattened state; its tensors are still those that training changes."""

    skeletons: dict[str, Any]
    """By part: everything that is not a tensor."""
    tensors: dict[Key, torch.Tensor]
    uneven: frozenset[str] = frozenset()
    """The parts of which ranks may hold different tensors. The first rank that holds one writes it."""

    @classmethod
    def of(cls, state: Mapping[str, Any], uneven: Collection[str] = ()) -> FlatState:
        """Flatten a state, a tree for each part; refuse by name what a checkpoint cannot hold."""
        skeletons: dict[str, Any] = {}
        tensors: dict[Key, torch.Tensor] = {}
        for part, tree in state.items():
            skeletons[part], part_tensors = flatten_state(tree, where=part)
            for name, tensor in part_tensors.items():
                dtype_name(tensor.dtype, f"{part}: {name}")  # raises if there is none
                tensors[part, name] = tensor
        return cls(skeletons, tensors, frozenset(uneven))

    def local(self, share: Share | None) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank writes: its share, or all."""
        if share is None:
            return self.tensors
        return {key: local_tensor(self.tensors[key]) for key in share}


class Snapshot(NamedTuple):
    """A copy of a state at one moment, which training does not change."""

    skeletons: dict[str, Any]
    """By part: everything that is not a tensor."""
    tensors: dict[str, dict[str, torch.Tensor]]
    """By part: contiguous, on the CPU, by the names that they have in the file."""
    files: dict[str, str]
    """By part: the file that its tensors are written to."""


class HostBuffer:
    """The host memory for one snapshot at a time: a new snapshot overwrites the last one."""

    def __init__(self) -> None:
        self._host: dict[Key, torch.Tensor] = {}

    def take(self, state: FlatState, share: Share | None = None) -> Snapshot:
        """Copy the current state, or this rank's share of it; the previous snapshot must not be in use any more."""
        sources = state.local(share)
        host = {key: self._buffer_for(key, tensor) for key, tensor in sources.items()}
        if host:
            torch._foreach_copy_(list(host.values()), list(sources.values()), non_blocking=True)
        for device in {tensor.device for tensor in sources.values() if has_streams(tensor.device)}:
            torch.get_device_module(device).current_stream(device).synchronize()
        self._host = host
        tensors: dict[str, dict[str, torch.Tensor]] = {part: {} for part in state.skeletons}
        files = {part: f"{part}.safetensors" for part in state.skeletons}
        for key, tensor in host.items():
            part, name = key
            if share is not None:
                files[part], name = share[key].file, share[key].name
            tensors[part][name] = tensor
        return Snapshot(state.skeletons, tensors, files)

    def allocation(self, state: FlatState, share: Share | None = None) -> Callable[[], None]:
        """Return a job that allocates the memory for a snapshot, so that the first one is as fast as later ones.

        The job may run in another thread: it knows the shapes, and does not touch the state itself. If there is no
        memory, or none that can be pinned, the first snapshot will fail.
        """
        sources = state.local(share)
        wanted = [(key, tensor.shape, tensor.dtype, has_streams(tensor.device)) for key, tensor in sources.items()]

        def allocate() -> None:
            with contextlib.suppress(RuntimeError, MemoryError):
                for key, shape, dtype, pinned in wanted:
                    self._host[key] = torch.empty(shape, dtype=dtype, pin_memory=pinned).zero_()

        return allocate

    def _buffer_for(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        known = self._host.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
