"""Gradients of a model that is spread: scaled and clipped wherever their pieces are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from instep.parallel.strategy import Reducer
from instep.parallel.total_norm import clip_gradients, local_gradients
from instep.world.grid import Grid


class SpreadReducer(Reducer):
    """Works on this rank's pieces; the norm is that of all of them."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], grid: Grid, stages_with: Mapping[nn.Parameter, int] | None = None
    ) -> None:
        super().__init__(parameters)
        self._grid = grid
        self._stages_with = stages_with
        """Of how many stages a shared parameter is: it counts once in the norm."""

    def scale(self, factor: float) -> None:
        if gradients := local_gradients(self.parameters):
            torch._foreach_mul_(gradients, factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        return clip_gradients(self.parameters, max_norm, self._grid, self._stages_with)
