"""The ranks of a tensor-parallel group, and the collectives between them, each with its gradient.

[Note: Regions]
Where every rank of a group holds the same tensor, the gradient of that tensor is complete and the same on all of them.
Where each holds a shard, its gradient is that of its shard. Five functions lead from one to the other:

    copy_to_group      the same tensor, used by each rank for its shard   backward: all-reduce
    scatter_to_group   this rank's shard of a tensor that all hold        backward: all-gather
    gather_from_group  the whole tensor, from the ranks' shards           backward: this rank's shard
    reduce_from_group  the sum of the ranks' terms                        backward: the identity
    redistribute       shards of the whole, as shards of each piece       backward: the reverse exchange

Ranks: all of a group, alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from instep.world.grid import Grid
from instep.world.world import World

Operation = Callable[[torch.Tensor], torch.Tensor]


class TensorParallelGroup:
    """The ranks along the axis tp, seen from one of them."""

    def __init__(self, grid: Grid) -> None:
        assert grid.devices is not None
        self.mesh = grid.devices["tp"]
        self.world = grid.world.within(self.mesh.get_group())
        """These ranks only."""
        self.size, self.rank = self.world.world_size, self.world.rank

    def __deepcopy__(self, _memo: object) -> TensorParallelGroup:
        return self  # a copy of a module refers to the same ranks

    def shard_ranges(self, size: int) -> list[tuple[int, int]]:
        """Return the first column and the number of columns of each rank's shard, as DTensor shards."""
        most = -(-size // self.size)
        starts = [min(rank * most, size) for rank in range(self.size)]
        return [(start, min(most, size - start)) for start in starts]

    def shard_range(self, size: int) -> tuple[int, int]:
        """Return the first column and the number of columns of this rank's shard."""
        return self.shard_ranges(size)[self.rank]

    def can_shard(self, size: int) -> bool:
        """Return whether every rank gets at least one column."""
        return self.shard_ranges(size)[-1][1] > 0

    def local_shard(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a tensor, as a view."""
        return whole.narrow(dim, *self.shard_range(whole.shape[dim]))

    def all_gather(self, local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Return the whole tensor of the ranks' shards. Called on all ranks."""
        lengths = [length for _, length in self.shard_ranges(size)]
        if local.shape[dim] < lengths[0]:  # an all-gather takes tensors of one shape
            missing = list(local.shape)
            missing[dim] = lengths[0] - local.shape[dim]
            local = torch.cat([local, local.new_zeros(missing)], dim)
        shards = self.world.all_gather(local)
        return torch.cat([shard.narrow(dim, 0, length) for shard, length in zip(shards, lengths, strict=True)], dim)


class _WithBackward(torch.autograd.Function):
    """An operation with the operation that computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Operation, backward: Operation) -> torch.Tensor:
        ctx.operation = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.operation(grad), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        ctx.mark_dirty(term)
        return group.world.all_reduce(term)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def _differentiable(x: torch.Tensor, forward: Operation, backward: Operation) -> torch.Tensor:
    result: torch.Tensor = _WithBackward.apply(x, forward, backward)
    return result


def copy_to_group(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return a tensor that each rank uses for its shard; the ranks' gradients are all-reduced."""
    if not x.requires_grad:
        return x

    def all_reduce(grad: torch.Tensor) -> torch.Tensor:
        return group.world.all_reduce(grad.clone(memory_format=torch.contiguous_format))

    return _differentiable(x, lambda x: x.view_as(x), all_reduce)


def scatter_to_group(x: torch.Tensor, dim: int, group: TensorParallelGroup) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks hold."""
    dim %= x.dim()
    if not x.requires_grad:
        return group.local_shard(x, dim)
    size = x.shape[dim]
    return _differentiable(
        x, lambda x: group.local_shard(x, dim).contiguous(), lambda grad: group.all_gather(grad, dim, size)
    )


def gather_from_group(local: torch.Tensor, dim: int, size: int, group: TensorParallelGroup) -> torch.Tensor:
    """Return the whole tensor of which each rank holds a shard."""
    return _differentiable(
        local, lambda local: group.all_gather(local, dim, size), lambda grad: group.local_shard(grad, dim)
    )


def reduce_from_group(term: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return the sum of the ranks' terms, in place: the caller has made `term` for this."""
    total: torch.Tensor = _AllReduce.apply(term.contiguous(), group)
    return total


def redistribute(local: torch.Tensor, dim: int, sizes: tuple[int, ...], group: TensorParallelGroup) -> torch.Tensor:
    """Redistribute columns that consist of several pieces (`sizes`): each rank gets its share of each piece."""
    there, back = _exchanges(sizes, group.size, group.rank)
    return _differentiable(
        local, lambda local: there.run(local, dim, group.world), lambda grad: back.run(grad, dim, group.world)
    )


class _Exchange:
    """An all-to-all of columns: which ones a rank sends to each rank, and the order of those that it receives."""

    def __init__(self, have: Sequence[Sequence[int]], want: Sequence[Sequence[int]], rank: int) -> None:
        wanted = [set(columns) for columns in want]
        sent = [[column for column in have[rank] if column in columns] for columns in wanted]
        received = [[column for column in columns if column in wanted[rank]] for columns in have]
        position = {column: number for number, column in enumerate(have[rank])}
        arrival = {column: number for number, column in enumerate([c for columns in received for c in columns])}
        self.send_counts, self.receive_counts = [*map(len, sent)], [*map(len, received)]
        self._send = torch.tensor([position[column] for columns in sent for column in columns])
        self._order = torch.tensor([arrival[column] for column in want[rank]])
        self._is_sorted = bool((self._order.diff() == 1).all())

    def run(self, local: torch.Tensor, dim: int, world: World) -> torch.Tensor:
        """Exchange columns. Called on all ranks."""
        if self._send.device != local.device:  # moved for good: a process has one device
            self._send, self._order = self._send.to(local.device), self._order.to(local.device)
        columns = local.movedim(dim, 0).index_select(0, self._send)
        received = world.all_to_all(columns, self.send_counts, self.receive_counts)
        return (received if self._is_sorted else received.index_select(0, self._order)).movedim(0, dim)


@lru_cache(maxsize=256)
def _exchanges(sizes: tuple[int, ...], num_ranks: int, rank: int) -> tuple[_Exchange, _Exchange]:
    """Return the exchange from shards of the whole to shards of each piece, and the reverse."""
    total = sum(sizes)
    most = -(-total // num_ranks)
    of_whole = [range(min(r * most, total), min((r + 1) * most, total)) for r in range(num_ranks)]
    of_pieces: list[list[int]] = [[] for _ in range(num_ranks)]
    first = 0
    for size in sizes:
        for r, columns in enumerate(of_pieces):
            columns.extend(range(first + r * size // num_ranks, first + (r + 1) * size // num_ranks))
        first += size
    return _Exchange(of_whole, of_pieces, rank), _Exchange(of_pieces, of_whole, rank)
