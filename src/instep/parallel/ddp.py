"""Data parallelism: the whole model on every rank, gradients added up.

[Note: Our own reducer]
torch's DistributedDataParallel averages over ranks, wants a backward pass on every rank in every step, and
gives a parameter that no rank used a zero gradient. The contract asks for sums weighted by samples or
tokens, parts of weight 0, and parameters without gradient that stay without. So the reduction is ours:
after backward the gradients are copied into one flat buffer a dtype, and the step's sums (loss, weight) and
one flag a parameter travel behind them, so that a step costs one collective. It is at least as fast on
gloo: docs/log.md has the comparison. Two ranks that share memory add up where the gradients lie, without that buffer
(World.sum_pieces).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instep.parallel.strategy import NUM_SUMS, Reducer, StepSums, Strategy
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
    """Parameters of one dtype, whose gradients travel together, with `behind` behind them."""

    def __init__(self, parameters: list[nn.Parameter], num_behind: int) -> None:
        self.parameters = parameters
        own = local_part(parameters[0])
        self.dtype = own.dtype
        self.behind = torch.zeros(num_behind, dtype=own.dtype, device=own.device)
        self._flat = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._in_place: list[torch.Tensor] = []

    def take_in_place(self) -> bool:
        """Get ready to add the gradients up where they lie; tell whether that can be."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) < len(self.parameters) or not all(_is_plain(grad, self.dtype) for grad in grads):
            return False
        spans = sorted((grad.data_ptr(), grad.data_ptr() + grad.nbytes) for grad in grads)
        if any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans)):  # memory of two gradients
            return False
        self._in_place = grads
        return True

    @torch.no_grad()
    def fill(self) -> list[bool]:
        """Copy the gradients into one row and tell which were there; a missing one counts as zero."""
        if not self._views:
            self._make_row()
        grads = [None if p.grad is None else local_part(p.grad) for p in self.parameters]
        dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
        if len(dense) == len(grads):
            torch._foreach_copy_(self._views, dense)
            return [True] * len(grads)
        for view, grad in zip(self._views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
        return [grad is not None for grad in grads]

    def _make_row(self) -> None:
        own = [local_part(p) for p in self.parameters]
        sizes = [p.numel() for p in own]
        self._flat = self.behind.new_zeros(sum(sizes) + self.behind.numel())
        *pieces, self._tail = self._flat.split([*sizes, self.behind.numel()])
        self._views = [piece.view_as(p) for piece, p in zip(pieces, own, strict=True)]

    def drop(self) -> None:
        """Take out what was copied in: another rank's counts."""
        for view in self._views:
            view.zero_()

    def sum(self, world: World) -> None:
        """Add up over all ranks what was filled in, or lies in place, and `behind`. Called on all ranks."""
        if self._in_place:
            world.all_reduce_coalesced([*self._in_place, self.behind])
            return
        self._tail.copy_(self.behind)
        world.all_reduce(self._flat)
        self.behind.copy_(self._tail)

    def adopt(self, counts: Sequence[float] | None) -> None:
        """Make the sums the gradients; a parameter that no rank used stays without."""
        if self._in_place:
            self._in_place = []
            return
        for i, (p, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            p.grad = like(p, view) if counts is None or counts[i] > 0 else None


def _is_plain(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a gradient is nothing but a row of such numbers in memory: no subclass, whose numbers may lie
    elsewhere, and no part of a graph.
    """
    if type(grad) is not torch.Tensor or grad.dtype != dtype or grad.layout is not torch.strided:
        return False
    return grad.is_contiguous() and not grad.requires_grad


class DdpReducer(Reducer):
    """Adds gradients up over the ranks; of DTensors, this rank's part of each.

    `counted`: whether this rank's gradients count; where not, a rank with the same ones counts in its place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, counted: bool = True) -> None:
        super().__init__(parameters)
        self._world, self._counted = world, counted
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in self.parameters:
            by_dtype.setdefault(p.dtype, []).append(p)
        num_behind = NUM_SUMS + len(self.parameters)
        carrier = next((dtype for dtype in by_dtype if dtype in _COUNTING), None)
        self._buckets = [_Bucket(group, num_behind * (dtype is carrier)) for dtype, group in by_dtype.items()]
        self._behind = next((bucket.behind for bucket in self._buckets if bucket.behind.numel()), None)
        """None: no dtype could carry the sums."""
        self._device = world.device

    def reduce(self, sums: StepSums) -> StepSums:
        used: list[bool] = []
        for bucket in self._buckets:
            in_place = self._counted and self._world.can_coalesce(bucket.dtype) and bucket.take_in_place()
            used += [True] * len(bucket.parameters) if in_place else bucket.fill()
        for bucket in () if self._counted else self._buckets:
            bucket.drop()
        alone = self._behind is None
        behind = self._behind if self._behind is not None else torch.empty(len(sums) + len(used), device=self._device)
        _write_behind(behind, sums, used)
        for bucket in self._buckets:
            bucket.sum(self._world)
        if alone:
            self._world.all_reduce(behind)
        # Reading the counts costs a wait for the GPU; a rank that used everything knows them without.
        counts = None if all(used) else behind[NUM_SUMS:].tolist()
        first = 0
        for bucket in self._buckets:
            stop = first + len(bucket.parameters)
            bucket.adopt(counts[first:stop] if counts is not None else None)
            first = stop
        return StepSums(*_row(behind)[:NUM_SUMS].tolist())


def _row(behind: torch.Tensor) -> Any:
    """See a small tensor as numpy does where it can, which is many times as fast."""
    return behind.numpy() if behind.device.type == "cpu" else behind


def _write_behind(behind: torch.Tensor, sums: StepSums, used: Sequence[bool]) -> None:
    row = _row(behind)
    for i, value in enumerate(sums):  # one that is on the GPU stays there
        row[i] = value
    row[len(sums) :] = 1.0 if all(used) else torch.tensor(used, dtype=behind.dtype)


class Ddp(Strategy):
    """The whole model on every rank."""

    name = "ddp"
    compiles_by_default = True
    axes = ("dp",)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return DdpReducer(parameters, self.grid.data)
