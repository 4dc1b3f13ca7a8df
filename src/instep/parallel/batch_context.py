"""What the layers of a model must know of the part of the global batch that runs through them.

[Note: BatchContext]
BatchNorm and dropout depend on the whole batch: the statistics on all its rows, a mask on where a row
stands in it. A rank sees its own rows only, so the loop tells the layers before each forward pass which
rows those are, through one BatchContext that all replaced layers of a model share. Numbers that change from step
to step live in a tensor, so that a compiled model is not compiled anew for each of them.
"""

from __future__ import annotations

from typing import Protocol

import torch

_MASK32 = 0xFFFFFFFF


def mix64(value: int) -> int:
    """Scramble 64 bits (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def signed32(value: int) -> int:
    """Reinterpret the low 32 bits as torch's int32 does."""
    value &= _MASK32
    return value - (1 << 32) if value >> 31 else value


class Noisy(Protocol):
    """A layer that draws noise."""

    uses: int
    """How often the layer was used since the part began: each use draws its own."""


class BatchContext:
    """The part of the global batch that the next forward pass works on."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.noise = torch.zeros(3, dtype=torch.int32, device=device)
        """Two words of noise key of the step, and the first row's position in the global batch."""
        self.num_rows = 0
        """Rows of this rank in this part; 0 outside of a training step."""
        self.smallest_part = 0
        """Rows, over all ranks, of the smallest part that any step of the training has."""
        self.shard = 0
        """In exact mode, the shard that this part is."""
        self.num_shards = 0
        """In exact mode, the shards of this step; else 0."""
        self.replicated = False
        """Whether every rank computes this whole part, so that nothing is to be exchanged."""
        self.has_zero_weight = False
        """Whether this rank's part has weight 0 ([Note: Parts of weight 0])."""
        self.zero_weight_flag = torch.zeros((), dtype=torch.bool, device=device)
        """The same for compiled code."""
        self.connected = False
        """Whether layers exchange something in backward, so that even a part of weight 0 must go through it."""
        self.again = False
        """Whether a block is gone through once more for its gradients: what is counted was counted before."""
        self.noisy: list[Noisy] = []
        """The layers that read `noise`."""
        self.doubts: dict[str, str] = {}
        """Guesses of layers that a person should know of, by the layer's name."""
        self.step_key = 0
        """64 bits that stand for (seed, step)."""

    def __deepcopy__(self, _memo: object) -> BatchContext:
        return self  # a copy of a model (an average of its weights) is of the same training

    def begin_step(self, step: int) -> None:
        """Set the noise key of a global step."""
        self.step_key = mix64(self.seed ^ mix64(step))

    def begin_part(self, first_row: int, num_rows: int, replicated: bool, shard: int = 0) -> None:
        """Announce the rows of the coming forward pass."""
        self.num_rows, self.shard = num_rows, shard
        self.replicated = replicated
        if self.noisy:
            for layer in self.noisy:
                layer.uses = 0
            words = (signed32(self.step_key), signed32(self.step_key >> 32), first_row)
            self.noise.copy_(torch.tensor(words, dtype=torch.int32))

    def set_zero_weight(self, has_zero_weight: bool) -> None:
        """Announce that the coming backward pass is that of a part of weight 0, or that it is over."""
        self.has_zero_weight = has_zero_weight
        self.zero_weight_flag.data.fill_(has_zero_weight)  # past autograd, which has saved this tensor

    def end_part(self) -> None:
        """Announce that what follows is no part of a training step."""
        self.num_rows = 0
