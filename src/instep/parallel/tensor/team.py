"""The ranks that share layers, and what passes between them while a model computes.

[Note: Regions]
Where every rank of a team holds the same tensor, its gradient is whole and the same on all of them, too. Where each
holds a part of one, its gradient is that of its part. Five steps lead from one to the other, and each knows its way
back:

    enter   the same tensor, used by each rank for its part     back: the ranks' gradients are added up
    cut     one tensor, of which each rank takes its part       back: the parts are joined
    join    the parts, joined on every rank                     back: each takes its part
    add     terms of a sum, added up on every rank              back: nothing to do
    pass on parts, dealt out anew                               back: the same way back

Ranks: all of a team, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from instep.world.grid import Grid
from instep.world.world import World


class Team:
    """The ranks along the axis tp, seen from one of them."""

    def __init__(self, world: World, mesh: DeviceMesh) -> None:
        self.world = world
        """These ranks only."""
        self.mesh = mesh
        self.size, self.rank = world.world_size, world.rank

    @classmethod
    def of(cls, grid: Grid) -> Team:
        """Give the team of this rank."""
        assert grid.devices is not None
        mesh = grid.devices["tp"]
        return cls(grid.world.within(mesh.get_group()), mesh)

    def __deepcopy__(self, _memo: object) -> Team:
        return self  # there is one, whoever copies a module that knows it

    def shares(self, size: int) -> list[tuple[int, int]]:
        """Where each rank's part of `size` columns begins, and how many it has; cut as DTensor cuts."""
        most = -(-size // self.size)
        starts = [min(rank * most, size) for rank in range(self.size)]
        return [(start, min(most, size - start)) for start in starts]

    def share(self, size: int) -> tuple[int, int]:
        """Where this rank's part begins, and how many columns it has."""
        return self.shares(size)[self.rank]

    def can_share(self, size: int) -> bool:
        """Tell whether every rank gets something."""
        return self.shares(size)[-1][1] > 0

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Give this rank's part of a tensor, as a view."""
        return whole.narrow(dim, *self.share(whole.shape[dim]))

    def put_together(self, part: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Join the ranks' parts. Called on all ranks."""
        lengths = [length for _, length in self.shares(size)]
        if part.shape[dim] < lengths[0]:  # only tensors of one shape can be gathered
            missing = list(part.shape)
            missing[dim] = lengths[0] - part.shape[dim]
            part = torch.cat([part, part.new_zeros(missing)], dim)
        parts = self.world.all_gather(part)
        return torch.cat([each.narrow(dim, 0, length) for each, length in zip(parts, lengths, strict=True)], dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.team.world.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, team: Team) -> torch.Tensor:
        ctx.team, ctx.dim, ctx.size = team, dim, x.shape[dim]
        return team.take(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.team.put_together(grad, ctx.dim, ctx.size), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, size: int, team: Team) -> torch.Tensor:
        ctx.team, ctx.dim = team, dim
        return team.put_together(part, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.team.take(grad, ctx.dim), None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.mark_dirty(term)
        return team.world.all_reduce(term)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, sizes: tuple[int, ...], team: Team) -> torch.Tensor:
        ctx.team, ctx.dim, ctx.sizes = team, dim, sizes
        there, _ = _routes(sizes, team.size, team.rank)
        return there.follow(part, dim, team.world)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, back = _routes(ctx.sizes, ctx.team.size, ctx.team.rank)
        return back.follow(grad, ctx.dim, ctx.team.world), None, None, None


def enter(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Let each rank use the same tensor for its part."""
    return _Enter.apply(x, team) if x.requires_grad else x


def cut(x: torch.Tensor, dim: int, team: Team) -> torch.Tensor:
    """Take this rank's part of a tensor that all hold."""
    dim %= x.dim()
    return _Cut.apply(x, dim, team) if x.requires_grad else team.take(x, dim)


def join(part: torch.Tensor, dim: int, size: int, team: Team) -> torch.Tensor:
    """Join the parts that the ranks hold."""
    joined: torch.Tensor = _Join.apply(part, dim, size, team)
    return joined


def add(term: torch.Tensor, team: Team) -> torch.Tensor:
    """Add up what the ranks hold, in place: `term` was made for this, and nobody else has it."""
    total: torch.Tensor = _Add.apply(term.contiguous(), team)
    return total


def pass_on(part: torch.Tensor, dim: int, sizes: tuple[int, ...], team: Team) -> torch.Tensor:
    """Deal columns that lie one piece after the other (`sizes`) out anew: each rank gets its share of each piece."""
    dealt: torch.Tensor = _PassOn.apply(part, dim, sizes, team)
    return dealt


class _Route:
    """Which columns a rank sends to whom, and where it puts what comes."""

    def __init__(self, have: Sequence[Sequence[int]], want: Sequence[Sequence[int]], rank: int) -> None:
        wanted = [set(columns) for columns in want]
        sent = [[column for column in have[rank] if column in theirs] for theirs in wanted]
        come = [[column for column in theirs if column in wanted[rank]] for theirs in have]
        mine = {column: place for place, column in enumerate(have[rank])}
        came = {column: place for place, column in enumerate([c for each in come for c in each])}
        self.send_counts, self.receive_counts = [*map(len, sent)], [*map(len, come)]
        self._send = torch.tensor([mine[column] for each in sent for column in each])
        self._order = torch.tensor([came[column] for column in want[rank]])
        self._is_sorted = bool((self._order.diff() == 1).all())

    def follow(self, part: torch.Tensor, dim: int, world: World) -> torch.Tensor:
        """Exchange columns. Called on all ranks."""
        if self._send.device != part.device:  # to stay there: a process has one device
            self._send, self._order = self._send.to(part.device), self._order.to(part.device)
        rows = part.movedim(dim, 0).index_select(0, self._send)
        got = world.all_to_all(rows, self.send_counts, self.receive_counts)
        return (got if self._is_sorted else got.index_select(0, self._order)).movedim(0, dim)


@lru_cache(maxsize=256)
def _routes(sizes: tuple[int, ...], num_ranks: int, rank: int) -> tuple[_Route, _Route]:
    """Find the way from even shares of the whole to even shares of each piece, and back."""
    total = sum(sizes)
    most = -(-total // num_ranks)
    whole = [range(min(r * most, total), min((r + 1) * most, total)) for r in range(num_ranks)]
    by_piece: list[list[int]] = [[] for _ in range(num_ranks)]
    first = 0
    for size in sizes:
        for r, columns in enumerate(by_piece):
            columns.extend(range(first + r * size // num_ranks, first + (r + 1) * size // num_ranks))
        first += size
    return _Route(whole, by_piece, rank), _Route(by_piece, whole, rank)
