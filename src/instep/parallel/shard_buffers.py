"""Buffers that a model writes to in its forward pass, in exact mode.

[Note: Shard buffers]
Spectral normalisation, moving averages and the like write to buffers in every forward pass. The number of passes of a
rank depends on the number of ranks, so the changes must not accumulate: every shard begins with the values at the
beginning of the step, and after the step the buffers have the values that its last shard wrote. BatchNorm's running
statistics are treated separately ([Note: Shard statistics]).
"""

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.parallel.norm import ByShard
from instep.world.world import World


class _TrackedBuffer:
    """One buffer: its value at the beginning of the step, and the value that the newest shard wrote."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self.written: torch.Tensor | None = None
        self._changes_unseen = False
        """Whether it is written to through `.data`, which leaves its version as it is."""
        self._read()

    def begin_step(self) -> None:
        """Read the buffer again if it changed between two steps."""
        if self._is_changed():
            self._read()

    def _read(self) -> None:
        self.start = self.current.detach().clone()
        self._seen = self.current
        self._version = self.current._version

    def _is_changed(self) -> bool:
        return self._changes_unseen or self.current is not self._seen or self.current._version != self._version

    def detect_unseen_changes(self) -> None:
        """Find out whether it changed although its version did not."""
        if not self._is_changed() and not torch.equal(self.current, self.start):
            self._changes_unseen = True

    @property
    def current(self) -> torch.Tensor:
        buffer = self._module._buffers[self._name]
        assert buffer is not None
        return buffer

    def put_back(self) -> bool:
        """Restore the value of the step's beginning, and keep the shard's; return whether they differ."""
        if not self._is_changed():
            self.written = None
            return False
        self.written = self.current.detach().clone()
        self._set(self.start)
        return True

    def end_step(self) -> None:
        """Begin the next step with the value that was written."""
        if self.written is not None:
            self.start = self.written
            self._set(self.start)
            self.written = None

    def _set(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._seen.copy_(value)  # the same memory: a compiled model may refer to it
        self._module._buffers[self._name] = self._seen
        self._version = self._seen._version


class ShardBuffers:
    """The buffers of a model, seen from one rank."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if not isinstance(module, ByShard)]
        named = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
        self._empty = [(module, name) for module, name, buffer in named if buffer is None]
        distinct = {id(buffer): (module, name) for module, name, buffer in named if buffer is not None}
        self._buffers = [_TrackedBuffer(module, name) for module, name in distinct.values()]
        self._is_new = True

    def begin_step(self) -> None:
        """Read the buffers again that changed between two steps."""
        for buffer in self._buffers:
            buffer.begin_step()

    def end_shard(self) -> int:
        """Restore the buffers that a shard changed; return their number."""
        for module, name in self._empty:
            if module._buffers[name] is not None:
                raise TaskError(
                    f"the buffer {name!r} of a {type(module).__name__} is created in its forward pass. In exact mode "
                    "every shard must begin with the same buffers: give it a tensor in __init__."
                )
        if self._is_new:  # the first shard shows which buffers change unseen
            self._is_new = False
            for buffer in self._buffers:
                buffer.detect_unseen_changes()
        return sum([buffer.put_back() for buffer in self._buffers])

    def end_step(self, world: World, apply: bool) -> None:
        """Set the buffers to what the last shard wrote, or drop that. Called on all ranks."""
        if not apply:
            for buffer in self._buffers:
                buffer.written = None
            return
        # The last shard is always the last rank's.
        changed_here = [number for number, buffer in enumerate(self._buffers) if buffer.written is not None]
        changed = world.all_gather_object(changed_here)[-1]
        for number, buffer in enumerate(self._buffers):
            if number not in changed:
                buffer.written = None
            elif buffer.written is None:
                buffer.written = torch.empty_like(buffer.start)
        world.broadcast([b.written for b in self._buffers if b.written is not None], source=world.world_size - 1)
        for buffer in self._buffers:
            buffer.end_step()
