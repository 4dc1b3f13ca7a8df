"""One process: nothing is distributed, nothing is reduced."""

from collections.abc import Sequence

from torch import nn

from instep.parallel.strategy import Reducer, StepSums, Strategy


class LocalReducer(Reducer):
    """Leaves gradients as they are: there is one rank. Sparse ones become dense, as those of several ranks do."""

    def reduce(self, sums: StepSums) -> StepSums:
        for p in self.parameters:
            grad = p.grad
            if grad is not None and grad.is_sparse:
                p.grad = grad.to_dense()
        return sums.on_host()


class Single(Strategy):
    """The whole model on the only rank."""

    name = "single"
    allows_channels_last = True
    compiles_by_default = True

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return LocalReducer(parameters)
