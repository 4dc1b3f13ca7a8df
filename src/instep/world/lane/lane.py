"""The collectives of processes that share a machine, chunk by chunk through shared memory.

Ranks: all of the lane, in the same order.

[Note: Meetings]
Everything rests on one operation, the meeting: each rank posts a semaphore for every other one, then waits for
theirs. Nobody leaves a meeting before everyone has come, and what a rank wrote before it came is seen by all who
have left it ([Note: Hand-over]).

A collective is a generator. It comes to its meetings and looks for the others for a short while; where one keeps it
waiting it yields whom, and goes on once that one's post was taken. Whoever drives it decides how to wait: `run` in the
caller's thread, `begin` for as long as it pays.

There are two areas of staging, used in turn, one a chunk. What was written to an area is read before its reader comes
to a meeting of the next chunk; so when a rank writes to that area again, two chunks later, it has left a meeting to
which the others came only after they had read. No chunk needs a meeting to give its area back.

[Note: Around the ranks]
Up to a certain size every rank shows its numbers to all, in a slot of its own, and every rank adds all of them up:
one meeting. Beyond, a chunk is cut into shares, and each share goes around: one rank writes it, the next adds its own
numbers to it in the same place, and so on; after as many meetings as there are ranks all shares are ready, and
everyone copies the chunk out. Every number is read once and written once by each rank, besides the sum that stays in
the cache; when all stage everything first, that is half as much again (docs/log.md).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from instep.core.errors import PeerLost
from instep.world.lane.block import Block
from instep.world.lane.engine import KINDS, Engine, LaneView, Pieces
from instep.world.lane.meetings import ALL, NEVER_NS, CompiledMeetings, Meetings, PlainMeetings, incoming
from instep.world.lane.peers import Peers
from instep.world.lane.reduction import STEPS, AddUp, Reduction, combine, divide, spare_dtype
from instep.world.lane.semaphores import CELL_BYTES, create, has_post, try_wait, wait

_AREA_BYTES = 16 * 2**20
"""What goes around at once: the fewer meetings the better, with more ranks than cores above all."""
_LARGEST_CHUNK_BYTES = 2 * 2**20
_SMALLEST_CHUNK_BYTES = 64 * 2**10
"""Smaller chunks stay in the cache, larger ones need fewer meetings; docs/log.md has the measurements."""
_COMPILED_CHUNK_BYTES = 256 * 2**10
"""The compiled loops meet so cheaply that a chunk stays in a core's own cache."""
_THREADED_BYTES = 256 * 2**10
"""Beyond this size torch's kernels are faster than the compiled loops, if they have several threads a rank."""
_DIRECT_BYTES = 128 * 2**10
"""Up to this size every rank adds everything up by itself, which saves meetings."""
_SPIN_S, _CROWDED_SPIN_S = 2e-3, 5e-4
"""How long to look again and again before sleeping: waking up takes up to 0.4 ms, more than most waits last. With
more ranks than cores, whoever looks takes time from whom it waits for."""
_LOOK_AROUND_S = 0.02
_NUM_AREAS = 2


class Late(NamedTuple):
    """Somebody who keeps a collective waiting: the place, and what is waited in."""

    place: int
    what: str


Steps = Iterator[Late]
"""A collective, and whom it waits for on its way."""


def area_bytes(size: int) -> int:
    """How large each of the two areas of staging is on a lane of so many ranks."""
    return size * _LARGEST_CHUNK_BYTES if size <= 2 else max(_AREA_BYTES, size * _SMALLEST_CHUNK_BYTES)


def chunk_bytes(size: int) -> int:
    """How large a rank's slot of an area is on a lane of so many ranks."""
    return min(_LARGEST_CHUNK_BYTES, area_bytes(size) // size & -4096)


def block_bytes(size: int) -> int:
    """How much memory a lane of so many ranks takes."""
    return _staging_start(size) + _NUM_AREAS * area_bytes(size)


def _staging_start(size: int) -> int:
    semaphores = size * size * CELL_BYTES
    return Block.HEADER_BYTES + -(-semaphores // 4096) * 4096


def chunks_of(flat: torch.Tensor, num_bytes: int) -> Sequence[torch.Tensor]:
    """Cut what goes around into chunks of at most `num_bytes`, all of a size: a short one has as many meetings."""
    num_chunks = max(1, -(-flat.numel() * spare_dtype(flat.dtype).itemsize // num_bytes))
    chunks: Sequence[torch.Tensor] = flat.split(-(-flat.numel() // num_chunks))
    return chunks


def prepare(block: Block, size: int) -> None:
    """Make the semaphores of a new block, one for each rank to each other one."""
    for cell in range(size * size):
        create(block.pointer + Block.HEADER_BYTES + cell * CELL_BYTES)


class Lane:
    """One rank's place among the ranks that share a machine."""

    def __init__(
        self,
        block: Block,
        place: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        timeout_s: float,
        engine: Engine | None,
        threads: int,
    ) -> None:
        """`engine` and `threads`, the most that a rank computes with, are the same on all ranks."""
        self.size = len(ranks)
        self.place = place
        self.timeout_s = timeout_s
        self._block = block
        self._peers = Peers(ranks, pids, place)
        # Two bytes a rank, behind the block's token: whether it has left, and whether it has given up. Then a place
        # each: whom it waited for when it gave up.
        marks = block.bytes[64 : 64 + 4 * self.size]
        self._left, self._gave_up = marks[: self.size], marks[self.size : 2 * self.size]
        self._blamed = marks[2 * self.size :].view(torch.int16)
        self._chunk_bytes = chunk_bytes(self.size)
        self._engine, self._view = engine, self._view_of(block)
        self._compiled_bytes = 0 if engine is None else sys.maxsize if threads == 1 else _THREADED_BYTES
        """Up to which size sums are the compiled loops' to do."""
        self._meetings: Meetings = CompiledMeetings(engine, self._view) if engine else PlainMeetings(self._view)
        self._incoming = incoming(self._view)
        self._deadline_ns = NEVER_NS
        """Until when to look for others, if that is sooner than the meetings would give up."""
        self._turn = 0
        self._areas: dict[torch.dtype, list[tuple[torch.Tensor, Sequence[torch.Tensor]]]] = {}
        self._spare: dict[torch.dtype, torch.Tensor] = {}
        self._broken = ""

    def _view_of(self, block: Block) -> LaneView:
        crowded = self.size > len(os.sched_getaffinity(0))
        return LaneView(
            cells=block.pointer + Block.HEADER_BYTES,
            staging=block.pointer + _staging_start(self.size),
            size=self.size,
            place=self.place,
            slot_bytes=self._chunk_bytes,
            area_bytes=area_bytes(self.size),
            chunk_bytes=min(self._chunk_bytes, _COMPILED_CHUNK_BYTES),
            spin_ns=round(1e9 * (_CROWDED_SPIN_S if crowded else _SPIN_S)),
            crowded=crowded,
        )

    def all_reduce(self, flat: torch.Tensor, how: Reduction = Reduction.SUM) -> Steps:
        """Combine the ranks' tensors, in place; contiguous and 1-D. Called on all ranks of the lane."""
        if self.size > 2 and flat.nbytes > _DIRECT_BYTES:
            yield from self.all_reduce_around(flat, how, self.size, None, area_bytes(self.size))
            return
        if flat.nbytes <= self._compiled_bytes and how is Reduction.SUM and flat.dtype in KINDS:
            yield from self._sum((flat,))
            return
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            slots = [slot[: piece.numel()] for slot in self._next_slots(piece.dtype)]
            slots[self.place].copy_(piece)
            yield from self._meet("all_reduce")
            # All do the same, so all hold the same bits. One's own numbers are still in the cache.
            slots[self.place] = piece
            self._combine(how, slots, piece)

    def can_coalesce(self, dtype: torch.dtype) -> bool:
        """Tell whether `all_reduce_coalesced` is there for such numbers. All ranks of a lane are told the same."""
        return self._compiled_bytes == sys.maxsize and self.size == 2 and dtype in KINDS

    def all_reduce_coalesced(self, pieces: Sequence[torch.Tensor]) -> Steps:
        """Add up what lies in several tensors, in place, as if they were one row, which is what another rank may call
        `all_reduce` with; contiguous. Called on all ranks of the lane.
        """
        return self._sum(pieces)

    def _sum(self, tensors: Sequence[torch.Tensor]) -> Steps:
        assert self._engine is not None
        if self._broken:
            raise PeerLost(f"This group is broken: {self._broken}", [])
        pieces, turn, moment = Pieces(tensors), self._turn, 0
        self._turn ^= -(-pieces.num_bytes // self._view.chunk_bytes) & 1
        while (late := self._engine.sum(self._view, turn, pieces, moment, self._deadline_ns)) != ALL:
            yield Late(late % (self.size + 1), "all_reduce")
            moment = late + 1
        tracked = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tracked)  # what autograd has kept of them is of no use any more

    def all_reduce_around(
        self,
        flat: torch.Tensor,
        how: Reduction,
        num_shares: int,
        pass_on: Callable[[torch.Tensor], None] | None,
        num_bytes: int,
    ) -> Steps:
        """Combine the ranks' tensors by shares that go around the ranks ([Note: Around the ranks]); in chunks of
        `num_bytes`, at most `area_bytes`. Called on all ranks of the lane.

        The first `num_shares` ranks are the last to add to a share each; they may pass it on to other machines
        before everyone takes it.
        """
        dtype = spare_dtype(flat.dtype)
        ready: tuple[torch.Tensor, torch.Tensor] | None = None
        for piece in chunks_of(flat, num_bytes):
            total = self._next_area(dtype)[: piece.numel()]
            length = -(-piece.numel() // num_shares)
            shares = list(zip(total.split(length), piece.split(length), strict=True))
            for turn in range(self.size):
                index = (self.place - 1 - turn) % self.size  # at the last turn, its own place
                if index < len(shares):
                    self._add_own(how, *shares[index], turn)
                    if turn == self.size - 1 and pass_on is not None:
                        pass_on(shares[index][0])
                if turn == 0 and ready is not None:  # the chunk before: no meeting of its own
                    ready[0].copy_(ready[1])
                yield from self._meet("all_reduce")
            ready = piece, total
        if ready is not None:
            ready[0].copy_(ready[1])

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], how: Reduction) -> Steps:
        """Combine, for each rank, the parts meant for it; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // out.element_size() // self.size
        for start in range(0, out.numel(), share):
            stop = min(start + share, out.numel())
            slots = self._next_slots(out.dtype)
            for place, part in enumerate(parts):
                slots[self.place][place * share : place * share + stop - start].copy_(part[start:stop])
            yield from self._meet("reduce_scatter")
            first = self.place * share
            self._combine(how, [slot[first : first + stop - start] for slot in slots], out[start:stop])

    def all_gather(self, outs: Sequence[torch.Tensor], own: torch.Tensor) -> Steps:
        """Collect the ranks' tensors; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // own.element_size()
        for start in range(0, own.numel(), share):
            piece = own[start : start + share]
            slots = self._next_slots(own.dtype)
            slots[self.place][: piece.numel()].copy_(piece)
            yield from self._meet("all_gather")
            for slot, out in zip(slots, outs, strict=True):
                out[start : start + piece.numel()].copy_(slot[: piece.numel()])

    def ordered_reduce(
        self,
        own: Sequence[torch.Tensor],
        counts: Sequence[int],
        add_up: AddUp,
        out: torch.Tensor,
    ) -> Steps:
        """Add up the ranks' rows, `counts` of them, in a way of the caller's: each rank a share of every chunk, in
        the staging itself, which it then shows to the others. Contiguous and 1-D. Called on all ranks of the lane.
        """
        length = self._chunk_bytes // out.element_size() // max(counts)
        for start in range(0, out.numel(), length):
            piece = out[start : start + length]
            slots = self._next_slots(out.dtype)
            for number, row in enumerate(own):
                slots[self.place][number * length :][: piece.numel()].copy_(row[start : start + length])
            yield from self._meet("fold")
            width = -(-piece.numel() // self.size)
            shares = [slice(width * place, width * (place + 1)) for place in range(self.size)]
            rows = [
                slot[n * length :][: piece.numel()]
                for slot, count in zip(slots, counts, strict=True)
                for n in range(count)
            ]
            total = add_up([row[shares[self.place]] for row in rows])
            slots[self.place][: piece.numel()][shares[self.place]].copy_(total)
            yield from self._meet("fold")
            for slot, share in zip(slots, shares, strict=True):
                piece[share].copy_(slot[: piece.numel()][share])

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrite the tensor with that of the rank at `root`; contiguous and 1-D. Called on all ranks."""
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            slot = self._next_slots(flat.dtype)[root][: piece.numel()]
            if self.place == root:
                slot.copy_(piece)
            yield from self._meet("broadcast")
            if self.place != root:
                piece.copy_(slot)

    def barrier(self) -> Steps:
        """Wait until every rank is here. Called on all ranks of the lane."""
        yield from self._meet("barrier")

    def run(self, steps: Steps) -> None:
        """Go through a collective, waiting as long as it takes."""
        try:
            for late in steps:
                self._sleep(*late)
        except BaseException:  # Ctrl-C, say: this rank and the others are out of step from here on
            self._broken = self._broken or "an operation did not come to its end."
            raise

    def begin(self, steps: Steps, patience_s: float) -> Callable[[], None] | None:
        """Go through a collective for as long as nobody keeps us waiting; give what is left to do, if anything is."""
        self._deadline_ns = time.monotonic_ns() + round(1e9 * patience_s)
        try:
            late = next(steps, None)
        except BaseException:
            self._broken = self._broken or "an operation did not come to its end."
            raise
        finally:
            self._deadline_ns = NEVER_NS
        return None if late is None else lambda: self._finish(late, steps)

    def _finish(self, late: Late, steps: Steps) -> None:
        self._sleep(*late)
        self.run(steps)

    def close(self) -> None:
        """Leave; whoever still waits for this rank is told."""
        self._left[self.place] = 1
        self._broken = self._broken or "it was closed."
        self._peers.close()

    def _add_own(self, how: Reduction, total: torch.Tensor, own: torch.Tensor, turn: int) -> None:
        if turn == 0:
            total.copy_(own)
        else:
            STEPS[how](total, own, out=total)
        if turn == self.size - 1 and how is Reduction.MEAN:
            divide(total, self.size)

    def _combine(self, how: Reduction, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        dtype = spare_dtype(out.dtype)
        if dtype not in self._spare:  # a chunk of numbers of two bytes has the most of them
            self._spare[dtype] = torch.empty(self._chunk_bytes // 2, dtype=dtype)
        combine(how, parts, out, self._spare[dtype])

    def _next_area(self, dtype: torch.dtype) -> torch.Tensor:
        """Give the staging of the next chunk."""
        if dtype not in self._areas:
            start = _staging_start(self.size)
            areas = self._block.bytes[start:].view(dtype).split(area_bytes(self.size) // dtype.itemsize)
            self._areas[dtype] = [
                (area, area.split(self._chunk_bytes // dtype.itemsize)[: self.size]) for area in areas
            ]
        self._turn ^= 1
        return self._areas[dtype][self._turn][0]

    def _next_slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Give the staging of the next chunk, as a slot for each rank, by place."""
        self._next_area(dtype)
        return list(self._areas[dtype][self._turn][1])

    def _meet(self, what: str) -> Steps:
        """Come to a meeting, and wait for the others."""
        if self._broken:
            raise PeerLost(f"This group is broken: {self._broken}", [])
        self._meetings.come()
        late = ALL
        while (late := self._meetings.take(late + 1, self._deadline_ns)) != ALL:
            yield Late(late, what)

    def _sleep(self, place: int, what: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        address = self._incoming[place]
        while not wait(address, _LOOK_AROUND_S):
            if self._broken:
                raise PeerLost(f"This group is broken: {self._broken}", [])
            lost = self._lost(place)
            if lost is None and time.monotonic() < deadline:
                continue
            if lost in (None, place) and not try_wait(address):  # it came just before it went
                return
            self._give_up(self._late(place) if lost is None else lost, what)

    def _missing(self, place: int) -> list[int]:
        """Give who has not come to this meeting, of those from `place` on; the ones before have come."""
        return [other for other, address in self._incoming.items() if other >= place and not has_post(address)]

    def _lost(self, place: int) -> int | None:
        """Find out whether everyone can still come; give whom to blame if not.

        The marks are hints for a message, read and written without order: they carry no data. A rank that has
        ended or left but had come to this meeting is no loss.
        """
        gave_up = [other for other, mark in enumerate(self._gave_up.tolist()) if mark and other != self.place]
        blamed = [int(self._blamed[other]) for other in gave_up]
        if blamed:  # who gave up because of us has ended for us; else the one it blames is the one
            return next((one for one in blamed if one != self.place), gave_up[0])
        gone = {*self._peers.ended(), *(other for other, mark in enumerate(self._left.tolist()) if mark)}
        return next((other for other in self._missing(place) if other in gone), None)

    def _late(self, place: int) -> int:
        """Choose whom to blame when time is up: one that is stopped rather than one that waits for it, too."""
        return next((other for other in self._missing(place) if self._peers.is_stopped(other)), place)

    def _give_up(self, place: int, what: str) -> None:
        """Say whom this rank waited for in vain. No meeting is possible after it."""
        who = self._peers.name(place)
        if place in self._peers.ended():
            found = f"{who} has ended"
        elif self._left[place]:
            found = f"{who} has left the group"
        elif self._gave_up[place] and int(self._blamed[place]) == self.place:
            found = f"{who} has given up waiting for this rank"
        else:
            found = f"{who} did not come within {self.timeout_s:g} s; it is {self._peers.state(place)}"
        self._blamed[self.place] = place
        self._gave_up[self.place] = 1
        self._broken = f"{found}."
        raise PeerLost(f"{found}, while {self._peers.name(self.place)} waited in {what}.", [self._peers.rank(place)])
