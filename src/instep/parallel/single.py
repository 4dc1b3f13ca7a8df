"""One process: nothing is distributed, nothing is reduced."""

from collections.abc import Sequence

from torch import nn

from instep.parallel.strategy import Reducer, StepSums, Strategy


class LocalReducer(Reducer):
    """Leaves gradients as they are: there is one rank."""

    def reduce(self, sums: StepSums) -> StepSums:
        return StepSums(*map(float, sums))


class Single(Strategy):
    """The whole model on the only rank."""

    name = "single"
    compiles_by_default = True

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return LocalReducer(parameters)
