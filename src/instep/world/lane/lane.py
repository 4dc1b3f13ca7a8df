"""The collectives of processes that share a machine, chunk by chunk through shared memory.

Ranks: all of the lane, in the same order.

[Note: Meetings]
Everything rests on one operation, the meeting: each rank posts a semaphore for every other one, then waits for
theirs. Nobody leaves a meeting before everyone has come, and what a rank wrote before it came is seen by all who
have left it ([Note: Hand-over]).

A collective is written as the steps between its meetings: a generator that yields wherever all must meet before it
goes on. Whoever drives it decides how to wait: `run` in the caller's thread, `begin` for as long as it pays.

Each rank has two slots of staging, used in turn, one a chunk. A chunk is written before a meeting and read after
it; so when a rank writes to a slot again, two chunks later, it has left a meeting to which the others came only
after they had read what the slot held before. No chunk needs a meeting to give its slot back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from instep.core.errors import PeerLost
from instep.world.lane.block import Block
from instep.world.lane.peers import Peers
from instep.world.lane.reduction import Reduction, combine, spare_dtype
from instep.world.lane.semaphores import CELL_BYTES, create, has_post, post, try_wait, wait

_ALL_CHUNKS_BYTES = 32 * 2**20
_LARGEST_CHUNK_BYTES = 2 * 2**20
_SMALLEST_CHUNK_BYTES = 64 * 2**10
"""Smaller chunks stay in the cache, larger ones need fewer meetings; docs/log.md has the measurements."""
_DIRECT_BYTES = 32 * 2**10
"""Up to this size every rank adds everything up by itself, which saves a meeting."""
_SPIN_S = 2e-3
"""How long to look again and again before sleeping: waking up takes up to 0.4 ms, more than most waits last."""
_LOOK_AROUND_S = 0.02
Steps = Iterator[str]
"""A collective: what lies between its meetings, and each meeting's name."""
_NUM_SLOTS = 2


def chunk_bytes(size: int) -> int:
    """Choose how large a chunk is on a lane of so many ranks: what they all stage stays bounded."""
    share = _ALL_CHUNKS_BYTES // (_NUM_SLOTS * size)
    return max(_SMALLEST_CHUNK_BYTES, min(_LARGEST_CHUNK_BYTES, share & -4096))


def block_bytes(size: int) -> int:
    """How much memory a lane of so many ranks takes."""
    return _staging_start(size) + _NUM_SLOTS * size * chunk_bytes(size)


def _staging_start(size: int) -> int:
    semaphores = size * size * CELL_BYTES
    return Block.HEADER_BYTES + -(-semaphores // 4096) * 4096


def prepare(block: Block, size: int) -> None:
    """Make the semaphores of a new block, one for each rank to each other one."""
    for cell in range(size * size):
        create(block.pointer + Block.HEADER_BYTES + cell * CELL_BYTES)


class Lane:
    """One rank's place among the ranks that share a machine."""

    def __init__(self, block: Block, place: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float) -> None:
        self.size = len(ranks)
        self.place = place
        self.timeout_s = timeout_s
        self._block = block
        self._peers = Peers(ranks, pids, place)
        others = [other for other in range(self.size) if other != place]
        cells = block.pointer + Block.HEADER_BYTES
        self._outgoing = [cells + (place * self.size + other) * CELL_BYTES for other in others]
        self._incoming = [(other, cells + (other * self.size + place) * CELL_BYTES) for other in others]
        # Two bytes a rank, behind the block's token: whether it has left, and whether it has given up. Then a place
        # each: whom it waited for when it gave up.
        marks = block.bytes[64 : 64 + 4 * self.size]
        self._left, self._gave_up = marks[: self.size], marks[self.size : 2 * self.size]
        self._blamed = marks[2 * self.size :].view(torch.int16)
        self._chunk_bytes = chunk_bytes(self.size)
        self._turn = 0
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._spare: dict[torch.dtype, torch.Tensor] = {}
        self._broken = ""

    def all_reduce(self, flat: torch.Tensor, how: Reduction = Reduction.SUM) -> Steps:
        """Combine the ranks' tensors, in place; contiguous and 1-D. Called on all ranks of the lane."""
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            if self.size == 2 or piece.nbytes <= _DIRECT_BYTES:
                yield from self._reduce_alone(piece, how)
            else:
                yield from self._reduce_by_shares(piece, how, self.size, None)

    def all_reduce_by_shares(
        self,
        flat: torch.Tensor,
        how: Reduction,
        num_shares: int,
        pass_on: Callable[[torch.Tensor], None],
        num_bytes: int,
    ) -> Steps:
        """Combine the ranks' tensors, the first `num_shares` ranks a share each, which they pass on before it is
        given to the others; in chunks of `num_bytes`, at most this lane's. Called on all ranks of the lane.
        """
        for piece in flat.split(num_bytes // flat.element_size()):
            yield from self._reduce_by_shares(piece, how, num_shares, pass_on)

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], how: Reduction) -> Steps:
        """Combine, for each rank, the parts meant for it; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // out.element_size() // self.size
        for start in range(0, out.numel(), share):
            stop = min(start + share, out.numel())
            slots = self._next_slots(out.dtype)
            for place, part in enumerate(parts):
                slots[self.place][place * share : place * share + stop - start].copy_(part[start:stop])
            yield "reduce_scatter"
            first = self.place * share
            self._combine(how, [slot[first : first + stop - start] for slot in slots], out[start:stop])

    def all_gather(self, outs: Sequence[torch.Tensor], own: torch.Tensor) -> Steps:
        """Collect the ranks' tensors; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // own.element_size()
        for start in range(0, own.numel(), share):
            piece = own[start : start + share]
            slots = self._next_slots(own.dtype)
            slots[self.place][: piece.numel()].copy_(piece)
            yield "all_gather"
            for slot, out in zip(slots, outs, strict=True):
                out[start : start + piece.numel()].copy_(slot[: piece.numel()])

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrite the tensor with that of the rank at `root`; contiguous and 1-D. Called on all ranks."""
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            slot = self._next_slots(flat.dtype)[root][: piece.numel()]
            if self.place == root:
                slot.copy_(piece)
            yield "broadcast"
            if self.place != root:
                piece.copy_(slot)

    def barrier(self) -> Steps:
        """Wait until every rank is here. Called on all ranks of the lane."""
        yield "barrier"

    def run(self, steps: Steps) -> None:
        """Go through a collective, waiting as long as it takes."""
        try:
            for what in steps:
                for place, address in self._come():
                    if try_wait(address) and not self._spin(address, time.perf_counter() + _SPIN_S):
                        self._sleep(place, address, what)
        except BaseException:  # Ctrl-C, say: this rank and the others are out of step from here on
            self._broken = self._broken or "an operation did not come to its end."
            raise

    def begin(self, steps: Steps, patience_s: float) -> Callable[[], None] | None:
        """Go through a collective for as long as nobody keeps us waiting; give what is left to do, if anything is."""
        limit = time.perf_counter() + patience_s
        try:
            for what in steps:
                missing = [each for each in self._come() if try_wait(each[1]) and not self._spin(each[1], limit)]
                if missing:
                    return lambda: self._finish(missing, what, steps)
        except BaseException:
            self._broken = self._broken or "an operation did not come to its end."
            raise
        return None

    def _finish(self, missing: list[tuple[int, int]], what: str, steps: Steps) -> None:
        for place, address in missing:
            self._sleep(place, address, what)
        self.run(steps)

    def close(self) -> None:
        """Leave; whoever still waits for this rank is told."""
        self._left[self.place] = 1
        self._broken = self._broken or "it was closed."
        self._peers.close()

    def _reduce_alone(self, piece: torch.Tensor, how: Reduction) -> Steps:
        """Combine what all ranks have staged, each by itself; all do the same, so all hold the same bits."""
        slots = [slot[: piece.numel()] for slot in self._next_slots(piece.dtype)]
        slots[self.place].copy_(piece)
        yield "all_reduce"
        slots[self.place] = piece  # the same numbers, still in the cache
        self._combine(how, slots, piece)

    def _reduce_by_shares(
        self, piece: torch.Tensor, how: Reduction, num_shares: int, pass_on: Callable[[torch.Tensor], None] | None
    ) -> Steps:
        """Combine a share each and take the others' shares from them: the work does not grow with the ranks."""
        slots = self._next_slots(piece.dtype)
        own = slots[self.place]
        length = -(-piece.numel() // num_shares)
        shares = [slice(length * n, length * (n + 1)) for n in range(num_shares)]
        for place, share in enumerate(shares):
            if place != self.place:
                own[: piece.numel()][share].copy_(piece[share])
        yield "all_reduce"
        if self.place < num_shares:
            share = shares[self.place]
            mine = piece[share]
            self._combine(how, [mine if slot is own else slot[: piece.numel()][share] for slot in slots], mine)
            if pass_on is not None:
                pass_on(mine)
            own[: piece.numel()][share].copy_(mine)
        yield "all_reduce"
        for place, share in enumerate(shares):
            if place != self.place:
                piece[share].copy_(slots[place][: piece.numel()][share])

    def _combine(self, how: Reduction, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        dtype = spare_dtype(out.dtype)
        if dtype not in self._spare:  # a chunk of numbers of two bytes has the most of them
            self._spare[dtype] = torch.empty(self._chunk_bytes // 2, dtype=dtype)
        combine(how, parts, out, self._spare[dtype])

    def _next_slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Give the ranks' slots for the next chunk, by place."""
        if dtype not in self._views:
            start = _staging_start(self.size)
            slots = self._block.bytes[start:].view(dtype).split(self._chunk_bytes // dtype.itemsize)
            self._views[dtype] = [list(slots[: self.size]), list(slots[self.size :])]
        self._turn ^= 1
        return self._views[dtype][self._turn]

    def _come(self) -> list[tuple[int, int]]:
        """Come to a meeting; give whom to wait for."""
        if self._broken:
            raise PeerLost(f"This group is broken: {self._broken}", [])
        for address in self._outgoing:
            post(address)
        return self._incoming

    def _spin(self, address: int, limit: float) -> bool:
        """Look again and again until a moment; tell whether the one waited for has come."""
        while time.perf_counter() < limit:
            os.sched_yield()  # with more ranks than cores, the one waited for may need this core
            if not try_wait(address):
                return True
        return False

    def _sleep(self, place: int, address: int, what: str) -> None:
        deadline = time.monotonic() + self.timeout_s
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
        return [other for other, address in self._incoming if other >= place and not has_post(address)]

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
