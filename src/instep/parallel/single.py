"""One process: nothing to spread, nothing to agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from instep.parallel.strategy import Reducer, Strategy


class LocalReducer(Reducer):
    """The gradients are what they should be already."""

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        return [float(value) for value in sums]


class Single(Strategy):
    """The whole model on the only rank."""

    name = "single"

    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:  # noqa: ARG002
        return LocalReducer(parameters)
