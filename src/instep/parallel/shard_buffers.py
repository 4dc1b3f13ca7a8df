"""Buffers that a model writes to in its forward pass, in exact mode.

[Note: Shard buffers]
Spectral normalisation, moving averages and the like leave something behind in every forward pass. How many passes a
rank makes depends on the number of ranks, so what they leave must not add up: every shard begins with what the
buffers held when the step began, and after the step they hold what its last shard left. BatchNorm's running
statistics are not among them ([Note: Shard statistics]).
"""

from __future__ import annotations

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.parallel.shard_norm import is_by_shard
from instep.world.world import World


class _Watched:
    """One buffer: what it held when the step began, and what the newest shard left in it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self.left: torch.Tensor | None = None
        self._restless = False
        """Whether it changes unnoticed, written to through `.data`."""
        self._look()

    def begin_step(self) -> None:
        """Take over what was done to the buffer between two steps."""
        if self._is_changed():
            self._look()

    def _look(self) -> None:
        self.begun = self.current.detach().clone()
        self._seen = self.current
        self._version = self.current._version

    def _is_changed(self) -> bool:
        return self._restless or self.current is not self._seen or self.current._version != self._version

    def look_closely(self) -> None:
        """Find out whether it was changed without a trace."""
        if not self._is_changed() and not torch.equal(self.current, self.begun):
            self._restless = True

    @property
    def current(self) -> torch.Tensor:
        buffer = self._module._buffers[self._name]
        assert buffer is not None
        return buffer

    def put_back(self) -> bool:
        """Undo what a shard did, and keep it; tell whether it did anything."""
        if not self._is_changed():
            self.left = None
            return False
        self.left = self.current.detach().clone()
        self._set(self.begun)
        return True

    def end_step(self) -> None:
        """Begin the next step with what was left."""
        if self.left is not None:
            self.begun = self.left
            self._set(self.begun)
            self.left = None

    def _set(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._seen.copy_(value)  # the same memory: a compiled model may hold on to it
        self._module._buffers[self._name] = self._seen
        self._version = self._seen._version


class ShardBuffers:
    """The buffers of a model, seen from one rank."""

    def __init__(self, model: nn.Module) -> None:
        named = [(module, name) for module in model.modules() if not is_by_shard(module) for name in module._buffers]
        self._empty = [(module, name) for module, name in named if module._buffers[name] is None]
        distinct = {
            id(module._buffers[name]): (module, name) for module, name in named if module._buffers[name] is not None
        }
        self._watched = [_Watched(module, name) for module, name in distinct.values()]
        self._is_new = True

    def begin_step(self) -> None:
        """Take over what was done to the buffers between two steps."""
        for watched in self._watched:
            watched.begin_step()

    def end_shard(self) -> int:
        """Put back what a shard changed; give how many buffers that were."""
        for module, name in self._empty:
            if module._buffers[name] is not None:
                raise TaskError(
                    f"the buffer {name!r} of a {type(module).__name__} is filled in its forward pass. In exact mode "
                    "every shard must find the same: give it a tensor in __init__."
                )
        if self._is_new:  # the first shard shows who writes without a trace
            self._is_new = False
            for watched in self._watched:
                watched.look_closely()
        return sum([watched.put_back() for watched in self._watched])

    def end_step(self, world: World, apply: bool) -> None:
        """Let what the last shard left be what the next step begins with, or drop it. Called on all ranks."""
        if not apply:
            for watched in self._watched:
                watched.left = None
            return
        # The last shard is always the last rank's.
        own = [number for number, watched in enumerate(self._watched) if watched.left is not None]
        changed = world.all_gather_object(own)[-1]
        for number, watched in enumerate(self._watched):
            if number not in changed:
                watched.left = None
            elif watched.left is None:
                watched.left = torch.empty_like(watched.begun)
        world.broadcast([w.left for w in self._watched if w.left is not None], source=world.world_size - 1)
        for watched in self._watched:
            watched.end_step()
