"""Data parallelism: the whole model on every rank, gradients added up.

[Note: Our own reducer]
torch's DistributedDataParallel averages over ranks, wants a backward pass on every rank in every step, and
gives a parameter that no rank used a zero gradient. The contract asks for sums weighted by samples or
tokens, parts of weight 0, and parameters without gradient that stay without. So the reduction is ours:
after backward the gradients are copied into one flat buffer a dtype, and the step's sums (loss, weight) and
one flag a parameter travel behind them, so that a step costs one collective. It is at least as fast on
gloo: docs/log.md has the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.parallel.strategy import Reducer, Strategy
from instep.parallel.total_norm import local_part
from instep.world.world import World

_COUNTING = (torch.float32, torch.float64)
"""Dtypes precise enough to carry the step's sums behind the gradients."""


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Give this rank's part of a gradient as the parameter is: a DTensor, or plain."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class _Bucket:
    """Parameters of one dtype, whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter], num_extra: int) -> None:
        self.parameters = parameters
        own = [local_part(p) for p in parameters]
        sizes = [p.numel() for p in own]
        self.flat = torch.zeros(sum(sizes) + num_extra, dtype=own[0].dtype, device=own[0].device)
        *pieces, self.extra = self.flat.split([*sizes, num_extra])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, own, strict=True)]

    def fill(self) -> list[bool]:
        """Copy the gradients in and tell which were there; a missing one counts as zero."""
        grads = [None if p.grad is None else local_part(p.grad) for p in self.parameters]
        dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
        if len(dense) == len(grads):
            torch._foreach_copy_(self.views, dense)
            return [True] * len(grads)
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
        return [grad is not None for grad in grads]

    def silence(self) -> None:
        """Take out what was copied in: another rank's counts."""
        for view in self.views:
            view.zero_()

    def adopt(self, counts: Sequence[float] | None) -> None:
        """Make the sums the gradients; a parameter that no rank used stays without."""
        for i, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            p.grad = like(p, view) if counts is None or counts[i] > 0 else None


class DdpReducer(Reducer):
    """Adds gradients up over the ranks; of DTensors, this rank's part of each.

    `counted`: whether this rank's gradients count; where not, a rank with the same ones counts in its place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, num_sums: int, counted: bool = True) -> None:
        super().__init__(parameters)
        self._world, self._counted = world, counted
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in self.parameters:
            by_dtype.setdefault(p.dtype, []).append(p)
        num_behind = num_sums + len(self.parameters)
        carrier = next((dtype for dtype in by_dtype if dtype in _COUNTING), None)
        self._buckets = [_Bucket(group, num_behind * (dtype is carrier)) for dtype, group in by_dtype.items()]
        self._behind = next((bucket.extra for bucket in self._buckets if bucket.extra.numel()), None)
        self._num_sums = num_sums
        self._device = world.device
        self._all_used = torch.ones(len(self.parameters))

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        used = [flag for bucket in self._buckets for flag in bucket.fill()]
        for bucket in () if self._counted else self._buckets:
            bucket.silence()
        flags = self._all_used if all(used) else torch.tensor(used, dtype=torch.float32)
        alone = self._behind is None
        behind = self._behind if self._behind is not None else torch.empty(len(sums) + len(flags), device=self._device)
        for i, value in enumerate(sums):
            behind[i] = value
        behind[self._num_sums :].copy_(flags)
        for bucket in self._buckets:
            self._world.sum(bucket.flat)
        if alone:
            self._world.sum(behind)
        # Reading the counts costs a wait for the GPU; a rank that used everything knows them without.
        counts = None if all(used) else behind[self._num_sums :].tolist()
        first = 0
        for bucket in self._buckets:
            stop = first + len(bucket.parameters)
            bucket.adopt(counts[first:stop] if counts is not None else None)
            first = stop
        return behind[: self._num_sums].tolist()


class Ddp(Strategy):
    """The whole model on every rank."""

    name = "ddp"

    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:
        return DdpReducer(parameters, self.grid.data, num_sums)
