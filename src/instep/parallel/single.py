"""One process: nothing is distributed, nothing is reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from instep.parallel.strategy import Reducer, Strategy


class LocalReducer(Reducer):
    """Leaves gradients as they are: there is one rank."""

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        return [float(value) for value in sums]


class Single(Strategy):
    """The whole model on the only rank."""

    name = "single"

    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:  # noqa: ARG002
        return LocalReducer(parameters)
