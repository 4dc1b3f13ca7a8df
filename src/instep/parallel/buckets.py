"""Gradients in buckets: flat buffers that are all-reduced one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from instep.parallel.gradients import copy_gradients, from_local, to_local
from instep.parallel.memory_format import view_like
from instep.world.exchange import Channel, Reduction
from instep.world.world import World

COUNTING = (torch.float32, torch.float64)
"""Dtypes precise enough for the step's sums."""
_BUCKET_S = 10e-3
"""How long a bucket should be on its way: many times what it costs to begin one, and short to wait for at the end."""
_LEAST_BYTES, _MOST_BYTES = 2**18, 2**25
DEFAULT_BYTES = 25 * 2**20
"""Where the size may not depend on a measurement; torch's DDP has the same."""
_FIRST_SHARE = 4
"""The first bucket is so many times smaller: nothing is on its way before it is full."""


def bucket_bytes(bytes_per_s: float) -> int:
    """Return how large buckets should be for a link of this speed."""
    return int(min(max(bytes_per_s * _BUCKET_S, _LEAST_BYTES), _MOST_BYTES))


def plan_buckets(parameters: Sequence[nn.Parameter], order: Sequence[int], num_bytes: int) -> list[list[int]]:
    """Cut parameters, by their numbers and in the order in which gradients become ready, into buckets of one dtype.

    Parameters that are not in `order` come last. Buckets are sorted by when they are complete; but the last one has,
    if possible, a dtype that is precise enough for the step's sums.
    """
    order = [*order, *sorted(set(range(len(parameters))) - set(order), reverse=True)]
    position = {number: i for i, number in enumerate(order)}
    filling: dict[torch.dtype, list[int]] = {}
    buckets: list[list[int]] = []
    limit = num_bytes // _FIRST_SHARE
    for number in order:
        bucket = filling.setdefault(parameters[number].dtype, [])
        bucket.append(number)
        if sum(to_local(parameters[other]).nbytes for other in bucket) >= limit:
            buckets.append(filling.pop(parameters[number].dtype))
            limit = num_bytes
    buckets = sorted([*buckets, *filling.values()], key=lambda bucket: position[bucket[-1]])
    carrier = next((bucket for bucket in reversed(buckets) if parameters[bucket[0]].dtype in COUNTING), None)
    return buckets if carrier is None else [*(bucket for bucket in buckets if bucket is not carrier), carrier]


def fixed_buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Cut parameters as their order alone says, where sums depend on the cut; backward has the last ones ready first.

    So every step adds in the same way, also the first one after a restart.
    """
    return plan_buckets(parameters, range(len(parameters))[::-1], DEFAULT_BYTES)


def in_order_of_readiness(buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[int]]:
    """Sort buckets by when their gradients, ready in this order, are complete; the last one keeps its place."""
    position = {number: i for i, number in enumerate(order)}
    *others, last = map(list, buckets)
    return [*sorted(others, key=lambda bucket: max(position.get(number, len(order)) for number in bucket)), last]


class Bucket:
    """Gradients of parameters of one dtype, followed by `extras`."""

    def __init__(self, parameters: list[nn.Parameter], num_extras: int = 0) -> None:
        self.parameters = parameters
        own = to_local(parameters[0])
        self.dtype = own.dtype
        self.extras = torch.zeros(num_extras, dtype=own.dtype, device=own.device)
        self.flat = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._in_place: list[torch.Tensor] = []
        self._prepared: Reduction | None = None
        self._pending: Reduction | dist.Work | None = None

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
    def fill(self, counted: bool = True) -> None:
        """Copy the gradients, if they count, into the flat buffer. A missing one counts as zero."""
        if not self._views:
            self._allocate()
        if counted:
            copy_gradients(self._views, [None if p.grad is None else to_local(p.grad) for p in self.parameters])
        else:
            torch._foreach_zero_(self._views)

    def _allocate(self) -> None:
        own = [to_local(p) for p in self.parameters]
        sizes = [p.numel() for p in own]
        self.flat = self.extras.new_zeros(sum(sizes) + self.extras.numel())
        *pieces, self._tail = self.flat.split([*sizes, self.extras.numel()])
        self._views = [view_like(piece, p) for piece, p in zip(pieces, own, strict=True)]

    @property
    def is_begun(self) -> bool:
        """Whether its all-reduce has begun and was not waited for."""
        return self._pending is not None

    def prepare(self, channel: Channel) -> None:
        """Be ready for the other ranks' gradients. Called on all ranks, though not at the same time."""
        if self._prepared is not None or self._pending is not None:
            return
        if not self._views:
            self._allocate()
        self._prepared = channel.prepare(self.flat)

    def begin_sum(self, world: World, channel: Channel | None) -> None:
        """Begin to all-reduce the copied gradients with the extras, through a channel if given. Called on all ranks."""
        self._tail.copy_(self.extras)
        if channel is None:
            self._pending = world.begin_all_reduce(self.flat)
            return
        if self._prepared is None:
            self.prepare(channel)
        assert self._prepared is not None
        world.comm_bytes += self.flat.nbytes
        self._pending, self._prepared = self._prepared.begin_sum(self.flat), None

    def sum(self, world: World) -> None:
        """All-reduce the copied gradients, or those in place, with the extras, or wait. Called on all ranks."""
        if self._in_place:
            world.all_reduce_coalesced([*self._in_place, self.extras])
            return
        if self._pending is None:
            self._tail.copy_(self.extras)
            world.all_reduce(self.flat)
        else:
            world.wait(self._pending)
            self._pending = None
        self.extras.copy_(self._tail)

    def adopt(self, is_used: Sequence[bool]) -> None:
        """Set the parameters' gradients to the sums; a parameter that no rank used has None."""
        if self._in_place:
            self._in_place = []
            return
        for p, view, used in zip(self.parameters, self._views, is_used, strict=True):
            p.grad = from_local(view, like=p) if used else None


def _is_plain(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a gradient is a contiguous torch.Tensor of this dtype, and no subclass or part of a graph."""
    if type(grad) is not torch.Tensor or grad.dtype != dtype or grad.layout is not torch.strided:
        return False
    return grad.is_contiguous() and not grad.requires_grad
