"""One process: nothing to spread, nothing to agree on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from instep.parallel.strategy import Reducer, StepSums, Strategy


class LocalReducer(Reducer):
    """The gradients are what they should be already."""

    def reduce(self, sums: StepSums) -> StepSums:
        return StepSums(*map(float, sums))


class Single(Strategy):
    """The whole model on the only rank."""

    name = "single"
    compiles_by_default = True

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return LocalReducer(parameters)
