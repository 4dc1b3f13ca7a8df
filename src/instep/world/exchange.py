"""Reductions between nodes that go on while the caller computes.

Ranks: all of the group; they begin the same reductions in the same order, though not at the same time.

[Note: Reductions in the background]
gloo's own asynchronous all-reduce adds in an order that depends on where an element is in its tensor, so the bits of a
sum would depend on how gradients are cut into buckets. Here the ranks exchange messages, and add in the order of the
ranks, or in one that the caller gives: any cut gives the same bits. Two ranks send each other all that they have. More
ranks are each responsible for a share: they receive everybody's rows of it, add them up, and send the total to all.
Either way a rank sends what a ring would send.

The first messages are posted by the caller, at once. A thread waits for those of the other ranks, adds, and posts the
totals, one reduction after the other; meanwhile the messages of the next ones are under way, and the link is never
idle. Each message has a tag of its own, so other collectives of the group may come between.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from instep.world.background import Background, Pending
from instep.world.lane.reduction import AddUp, Rows, accumulation_dtype

_NUM_TAGS = 2**30
"""Tags are reused after so many; by then their messages have long arrived."""


class PendingReduction:
    """A reduction in progress."""

    def __init__(self, pending: Pending, totals: list[Any]) -> None:
        self._pending, self._totals = pending, totals

    def wait(self) -> None:
        """Wait until the total is there; raise the error that prevented it."""
        self._pending.wait()
        _wait(self._totals)


class Exchange:
    """Reduces CPU tensors of ranks on different nodes ([Note: Reductions in the background])."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._background = Background()
        self._tag = 0
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """For reuse: memory that the system has just given out is slow to write to."""

    def all_reduce(self, flat: torch.Tensor) -> PendingReduction:
        """Begin to sum a contiguous 1-D tensor over all ranks, in place."""
        return self.ordered_reduce([flat], [1] * self._size, self._sum_in_order, flat)

    def ordered_reduce(self, own: Rows, counts: Sequence[int], add_up: AddUp, out: torch.Tensor) -> PendingReduction:
        """Begin to reduce rows as `World.ordered_reduce` does; `own` is written to, and `out` may be one of them."""
        self._tag = (self._tag + 2) % _NUM_TAGS
        tag, shares = self._tag, self._shares(out.numel())
        mine = shares[self._rank]
        received = {rank: [self._take(out[mine]) for _ in range(counts[rank])] for rank in self._others()}
        receives = [self._receive(row, rank, tag) for rank, rows in received.items() for row in rows]
        sends = [self._send(row[shares[rank]], rank, tag) for rank in self._others() for row in own]
        totals: list[Any] = []

        def finish() -> None:
            _wait(receives)
            _wait(sends)  # adding may write to what is sent
            rows = {**received, self._rank: [row[mine] for row in own]}
            total = add_up([row for rank in range(self._size) for row in rows[rank]])
            if total.data_ptr() != out[mine].data_ptr():
                out[mine].copy_(total)
            for row in (row for rows in received.values() for row in rows):
                self._free[row.numel(), row.dtype].append(row)
            if self._size > 2:
                totals.extend(self._receive(out[shares[rank]], rank, tag + 1) for rank in self._others())
                totals.extend(self._send(out[mine], rank, tag + 1) for rank in self._others())

        return PendingReduction(self._background.submit(finish, None), totals)

    def end(self) -> None:
        """End the thread, once it has nothing to do."""
        self._background.end()

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one, so that not all send to the same rank first."""
        return [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def _shares(self, length: int) -> list[slice]:
        """Return which elements each rank adds up: all of them where there are two ranks."""
        if self._size == 2:
            return [slice(0, length)] * 2
        bounds = [length * rank // self._size for rank in range(self._size + 1)]
        return [slice(*pair) for pair in itertools.pairwise(bounds)]

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.setdefault((like.numel(), like.dtype), [])
        return free.pop() if free else torch.empty_like(like)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._group.send([tensor], rank, tag) if tensor.numel() else None

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._group.recv([tensor], rank, tag) if tensor.numel() else None

    def _sum_in_order(self, rows: Rows) -> torch.Tensor:
        if self._size == 2:  # two terms have no order: this rank's own is where the sum belongs
            return rows[self._rank].add_(rows[1 - self._rank])
        total = rows[0].to(accumulation_dtype(rows[0].dtype))
        for row in rows[1:]:
            total.add_(row)
        return total


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
