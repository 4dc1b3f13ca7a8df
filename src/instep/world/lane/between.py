"""Several machines: shared memory inside each, sockets between them.

Ranks: all of the group, in the same order.

[Note: Hierarchical all-reduce]
A machine's ranks add a chunk up in shared memory ([Note: Around the ranks]); then the ranks at the same place of all
machines exchange the share that they completed over gloo (a rail), side by side with the other rails; then everyone
takes all shares from shared memory. Machines may have different numbers of ranks: there are as many rails as the
smallest machine has ranks, and ranks beyond only add and take. Sums are in the order of the ranks within a machine,
from one of them on, and in gloo's fixed order between machines.
"""

from __future__ import annotations

from typing import Protocol

import torch

from instep.world.lane.lane import Lane, Steps, area_bytes, chunks_of
from instep.world.lane.machines import MachinesPlan
from instep.world.lane.reduction import Reduction, divide, spare_dtype


class Rail(Protocol):
    """The ranks at one place of all machines."""

    def all_reduce(self, share: torch.Tensor, how: Reduction) -> None:
        """Combine their shares, in place; a mean is left a sum."""

    def broadcast(self, flat: torch.Tensor, machine: int) -> None:
        """Overwrite with what the rank on that machine has."""


class Between:
    """The way over several machines, seen from one rank: its lane (None: alone there), and its rail if it has one."""

    def __init__(self, lane: Lane | None, rail: Rail | None, plan: MachinesPlan, machine: int) -> None:
        self._lane, self._rail = lane, rail
        self._machine, self._num_rails = machine, plan.num_rails
        self._num_ranks = sum(map(len, plan.machines))
        # One for all: machines of different sizes have different slots, and gloo aborts on different pieces.
        self._chunk_bytes = min(area_bytes(len(ranks)) for ranks in plan.machines)

    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> Steps:
        """Combine the tensors of all ranks of all machines, in place. Called on all ranks."""
        rail = self._rail
        here = Reduction.SUM if how is Reduction.MEAN else how

        def pass_on(share: torch.Tensor) -> None:
            assert rail is not None  # as many shares as rails, and the ranks at their places have one
            rail.all_reduce(share, here)
            if how is Reduction.MEAN:
                divide(share, self._num_ranks)

        if self._lane is not None:
            yield from self._lane.all_reduce_around(flat, here, self._num_rails, pass_on, self._chunk_bytes)
            return
        dtype = spare_dtype(flat.dtype)  # as the other machines' ranks have it on their way
        for piece in chunks_of(flat, self._chunk_bytes):
            share = piece.to(dtype)
            pass_on(share)
            piece.copy_(share)

    def broadcast(self, flat: torch.Tensor, machine: int, place: int) -> Steps:
        """Overwrite the tensor with that of the rank at a place of a machine. Called on all ranks."""
        if self._lane is not None and machine == self._machine:
            yield from self._lane.broadcast(flat, place)
        if self._rail is not None and (self._lane is None or self._lane.place == 0):
            self._rail.broadcast(flat, machine)
        if self._lane is not None and machine != self._machine:
            yield from self._lane.broadcast(flat, 0)

    def barrier(self) -> Steps:
        """Wait until every rank of every machine is here. Called on all ranks."""
        yield from self.all_reduce(torch.zeros(1), Reduction.SUM)
