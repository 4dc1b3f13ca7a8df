"""Data parallelism: the whole model on every rank, gradients all-reduced.

[Note: Our own reducer]
torch's DistributedDataParallel averages over ranks, expects a backward pass on every rank in every step, and gives a
zero gradient to a parameter that no rank used. instep needs sums weighted by samples or tokens, parts of weight 0, and
parameters whose gradient stays None. So it has its own reduction: after backward the gradients are copied into one flat
buffer for each dtype. The step's sums (loss, weight) and one flag for each parameter follow them in the same buffer, so
that a step costs one collective. It is at least as fast on gloo: docs/log.md has the comparison. Two ranks that share
memory add gradients in place, without that buffer (World.all_reduce_coalesced).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.parallel.gradients import by_dtype, copy_gradients, from_local, to_local
from instep.parallel.strategy import NUM_SUMS, Reducer, StepSums, Strategy
from instep.world.world import World

_COUNTING = (torch.float32, torch.float64)
"""Dtypes precise enough for the step's sums."""


class _Bucket:
    """Parameters of one dtype, whose gradients are reduced together, followed by `extras`."""

    def __init__(self, parameters: list[nn.Parameter], num_extras: int) -> None:
        self.parameters = parameters
        own = to_local(parameters[0])
        self.dtype = own.dtype
        self.extras = torch.zeros(num_extras, dtype=own.dtype, device=own.device)
        self._flat = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._in_place: list[torch.Tensor] = []

    def take_in_place(self) -> bool:
        """Prepare an all-reduce of the gradients in place; return whether that is possible."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) < len(self.parameters) or not all(_is_plain(grad, self.dtype) for grad in grads):
            return False
        spans = sorted((grad.data_ptr(), grad.data_ptr() + grad.nbytes) for grad in grads)
        if any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans)):  # two gradients share memory
            return False
        self._in_place = grads
        return True

    @torch.no_grad()
    def fill(self, counted: bool) -> list[bool]:
        """Copy the gradients, if they count, into the flat buffer; return which exist. A missing one counts as zero."""
        if not self._views:
            self._allocate()
        grads = [None if p.grad is None else to_local(p.grad) for p in self.parameters]
        if counted:
            copy_gradients(self._views, grads)
        else:
            torch._foreach_zero_(self._views)
        return [grad is not None for grad in grads]

    def _allocate(self) -> None:
        own = [to_local(p) for p in self.parameters]
        sizes = [p.numel() for p in own]
        self._flat = self.extras.new_zeros(sum(sizes) + self.extras.numel())
        *pieces, self._tail = self._flat.split([*sizes, self.extras.numel()])
        self._views = [piece.view_as(p) for piece, p in zip(pieces, own, strict=True)]

    def sum(self, world: World) -> None:
        """All-reduce the copied gradients, or those in place, with the extras. Called on all ranks."""
        if self._in_place:
            world.all_reduce_coalesced([*self._in_place, self.extras])
            return
        self._tail.copy_(self.extras)
        world.all_reduce(self._flat)
        self.extras.copy_(self._tail)

    def adopt(self, counts: Sequence[float]) -> None:
        """Set the parameters' gradients to the sums; a parameter that no rank used has None."""
        if self._in_place:
            self._in_place = []
            return
        for p, view, count in zip(self.parameters, self._views, counts, strict=True):
            p.grad = from_local(view, like=p) if count > 0 else None


def _is_plain(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a gradient is a contiguous torch.Tensor of this dtype, and no subclass or part of a graph."""
    if type(grad) is not torch.Tensor or grad.dtype != dtype or grad.layout is not torch.strided:
        return False
    return grad.is_contiguous() and not grad.requires_grad


class DdpReducer(Reducer):
    """All-reduces gradients; of DTensors, this rank's shard of each.

    `counted`: whether this rank's gradients count. If not, another rank with the same gradients counts in its place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, counted: bool = True) -> None:
        super().__init__(parameters)
        self._world, self._counted = world, counted
        groups = by_dtype(self.parameters)
        num_extras = NUM_SUMS + len(self.parameters)
        carrier = next((dtype for dtype in groups if dtype in _COUNTING), None)
        self._buckets = [_Bucket(group, num_extras * (dtype is carrier)) for dtype, group in groups.items()]
        self._extras = next((bucket.extras for bucket in self._buckets if bucket.extras.numel()), None)
        """The step's sums, then one flag for each parameter; None: no bucket's dtype is precise enough."""

    def reduce(self, sums: StepSums) -> StepSums:
        used: list[bool] = []
        for bucket in self._buckets:
            in_place = self._counted and self._world.can_coalesce(bucket.dtype) and bucket.take_in_place()
            used += [True] * len(bucket.parameters) if in_place else bucket.fill(self._counted)
        extras = self._extras
        if extras is None:
            extras = torch.empty(len(sums) + len(used), device=self._world.device)
        array = _as_array(extras)
        for i, value in enumerate(sums):  # a value on the GPU stays there
            array[i] = value
        array[len(sums) :] = 1.0 if all(used) else torch.tensor(used, dtype=extras.dtype)
        for bucket in self._buckets:
            bucket.sum(self._world)
        if self._extras is None:
            self._world.all_reduce(extras)
        # Reading the counts waits for the GPU; a rank that used every parameter knows them already.
        counts = iter([1.0] * len(used) if all(used) else extras[NUM_SUMS:].tolist())
        for bucket in self._buckets:
            bucket.adopt(list(itertools.islice(counts, len(bucket.parameters))))
        return StepSums(*array[:NUM_SUMS].tolist())


def _as_array(tensor: torch.Tensor) -> Any:
    """Return a small CPU tensor as a NumPy array in the same memory, which is many times as fast to index."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


class Ddp(Strategy):
    """The whole model on every rank."""

    name = "ddp"
    compiles_by_default = True
    axes = ("dp",)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return DdpReducer(parameters, self.grid.data)
