"""What the layers of a model know of the part of the global batch that runs through them.

[Note: BatchContext]
BatchNorm and dropout depend on the whole batch: the statistics on all its rows, a mask on the position of a row in it.
A rank sees its own rows only. So before each forward pass the loop describes these rows in one BatchContext, which all
replaced layers of a model share. Numbers that change from step to step live in a tensor, so that they do not make
torch.compile compile a model again.

[Note: Recomputed noise]
A user's torch.utils.checkpoint runs a part of the forward pass again in backward, and restores torch's generators
first, so that the noise is the same. Our noise depends on how often a layer was used. So wherever code may be run
again, a number is drawn from torch's generator at each use, and remembered with the count of uses: in backward the same
number leads to the same noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from instep.core.splitmix import mix64


def signed32(value: int) -> int:
    """Reinterpret the low 32 bits as a signed number, as torch's int32 does."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def is_in_backward() -> bool:
    """Return whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _is_preserved() -> bool:
    """Return whether torch.utils.checkpoint may run this code again, or does so now."""
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(hooks) or not torch.is_grad_enabled() or is_in_backward()


class Noisy(Protocol):
    """A layer that draws noise."""

    uses: int
    """How often noise was drawn since the part began: each draw gives noise of its own."""


class Draws(Protocol):
    """What draws the noise of the user's own functions."""

    def begin_region(self) -> None: ...
    def end_region(self) -> None: ...


class BatchContext:
    """The part of the global batch that the next forward pass works on."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.noise = torch.zeros(3, dtype=torch.int32, device=device)
        """The two 32-bit halves of the step's noise key, and the first row's position in the global batch."""
        self.num_rows = 0
        """Rows of this rank in this part; 0 outside of a training step."""
        self.smallest_part = 0
        """Rows, over all ranks, of the smallest part in any step of the training."""
        self.shard = 0
        """In exact mode, the number of the shard that this part is."""
        self.num_shards = 0
        """In exact mode, the shards of this step; else 0."""
        self.replicated = False
        """Whether every rank computes this whole part, so that layers exchange nothing."""
        self.has_zero_weight = False
        """Whether this rank's part has weight 0 ([Note: Parts of weight 0])."""
        self.zero_weight_flag = torch.zeros((), dtype=torch.bool, device=device)
        """The same as a tensor, for compiled code."""
        self.connected = False
        """Whether layers communicate in backward, so that even a part of weight 0 must go through it."""
        self.again = False
        """Whether a block is being recomputed for its gradients: its first pass has counted already."""
        self.restores_uses = False
        """Whether a block is being computed that restores the counts of uses itself, before it is computed again."""
        self.compiles = False
        """Whether regions run compiled in this step ([Note: Regional compilation])."""
        self.keeps_noise = False
        """Whether a backward pass may need `noise` after the next part has begun: then its memory must not change."""
        self.noisy: list[Noisy] = []
        """What counts its uses in a part."""
        self.draws: Draws | None = None
        self._is_read = False
        """Whether anything reads `noise`: writing it takes time, on a GPU above all."""
        self.doubts: dict[str, str] = {}
        """Guesses of layers that the user should know of, by the layer's name."""
        self.step_key = 0
        """A 64-bit hash of (seed, step)."""
        self._first_row = self._key = 0
        self._preserved: dict[tuple[int, int], int] = {}
        """Which use of a layer it was when torch's generator gave a number ([Note: Recomputed noise])."""

    def __deepcopy__(self, _memo: object) -> BatchContext:
        return self  # a copy of a model (an average of its weights) belongs to the same training

    @property
    def runs_compiled(self) -> bool:
        """Whether a region that is called now runs compiled.

        What may be run again in backward does not: its noise could not be repeated ([Note: Recomputed noise]).
        """
        return self.compiles and self.num_rows > 0 and not _is_preserved()

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Count draws from the region's first one on, while the region runs compiled."""
        if self.draws is None:
            yield
            return
        self.draws.begin_region()
        try:
            yield
        finally:
            self.draws.end_region()

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run no region compiled for a while."""
        before, self.compiles = self.compiles, False
        try:
            yield
        finally:
            self.compiles = before

    @contextlib.contextmanager
    def outside_region(self) -> Iterator[None]:
        """Count draws of the whole part for a while: what a region calls that is not compiled with it."""
        if self.draws is None:
            yield
            return
        self.draws.end_region()
        try:
            yield
        finally:
            self.draws.begin_region()

    def begin_step(self, step: int, num_shards: int = 0) -> None:
        """Set the noise key of a global step, and the number of its shards."""
        self._preserved.clear()
        self.num_shards = num_shards
        self.step_key = mix64(self.seed ^ mix64(step))

    def begin_part(self, first_row: int, num_rows: int, replicated: bool, shard: int = 0, passes: int = 0) -> None:
        """Set the rows of the coming forward pass; `passes`: how often the step went through its parts before."""
        self.num_rows, self.shard = num_rows, shard
        self.replicated = replicated
        self._first_row = first_row
        self._key = mix64(self.step_key + passes) if passes else self.step_key  # a second pass draws noise of its own
        for layer in self.noisy:
            layer.uses = 0
        if self._is_read:
            self._write_noise()

    def read_noise(self) -> None:
        """Write `noise` from now on, also in the part under way."""
        if not self._is_read:
            self._is_read = True
            self._write_noise()

    def _write_noise(self) -> None:
        words = (signed32(self._key), signed32(self._key >> 32), self._first_row)
        noise = torch.tensor(words, dtype=torch.int32)
        if self.keeps_noise:
            self.noise = noise.to(self.noise.device)
        else:
            self.noise.copy_(noise)

    def next_use(self, layer: Noisy) -> int:
        """Count a use of a layer, and return which one it is; a recomputation repeats that of the first pass."""
        if self.restores_uses or torch.compiler.is_compiling() or not _is_preserved():
            layer.uses += 1
            return layer.uses
        key = id(layer), int(torch.empty((), dtype=torch.int64).random_())
        if is_in_backward() and key in self._preserved:
            return self._preserved[key]
        layer.uses += 1
        self._preserved[key] = layer.uses
        return layer.uses

    def set_zero_weight(self, has_zero_weight: bool) -> None:
        """Set whether the coming backward pass is that of a part of weight 0."""
        self.has_zero_weight = has_zero_weight
        self.zero_weight_flag.data.fill_(has_zero_weight)  # unseen by autograd, which has saved this tensor

    def end_part(self) -> None:
        """Note that what follows is no part of a training step."""
        self.num_rows = 0
