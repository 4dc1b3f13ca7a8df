"""The collectives of ranks that share a node, chunk by chunk through shared memory.

Ranks: all of the lane, in the same order.

[Note: Barriers]
Everything rests on one operation, the barrier: each rank posts a semaphore for every other rank, then waits for
theirs. No rank leaves a barrier before all have arrived, and what a rank wrote before it arrived is seen by all that
have left ([Note: Hand-over]).

A collective is a generator. At each barrier it spins for a short while; if a rank is still missing it yields that
rank, and continues once that rank's post was taken. The caller decides how to wait: `run` waits in the caller's thread,
`begin` runs for as long as nobody is missing.

There are two staging areas, used in turn, one per chunk. What was written to an area is read before its reader arrives
at a barrier of the next chunk. So when a rank writes to that area again, two chunks later, it has left a barrier at
which the others arrived only after they had read. No chunk needs a barrier to release its area.

[Note: Ring through shared memory]
Up to a certain size every rank writes its elements to a slot of its own, and every rank adds all slots up: one barrier.
Beyond, a chunk is cut into shares that go around the ranks as in a ring all-reduce: one rank writes a share, the next
adds its own elements to it in the same place, and so on. After as many barriers as there are ranks all shares are
complete, and every rank copies the chunk out. Each rank reads and writes every element once, besides the sum that stays
in the cache; staging everything first takes half as much again (docs/log.md).

[Note: The same collective]
Before its first barrier a rank writes which collective it is in, and of how many bytes, to a word of its own; after it,
the words of all ranks must be the same. There are two words for each rank, used in turn: one is overwritten two
collectives later, when all others have read it. The cells from a rank to itself, which have no semaphore, hold them.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from instep.core.errors import CollectiveMismatch
from instep.world.lane.barrier import ALL, CELL_BYTES, NEVER_NS, Barrier, CompiledBarrier, PythonBarrier, incoming
from instep.world.lane.block import Block
from instep.world.lane.engine import KINDS, Engine, LaneView, Pieces
from instep.world.lane.peers import Peers
from instep.world.lane.reduction import STEPS, AddUp, Reduction, Rows, accumulation_dtype, combine, divide

_AREA_BYTES = 16 * 2**20
"""What goes around the ring at once: few barriers are best, above all with more ranks than cores."""
_LARGEST_CHUNK_BYTES = 2 * 2**20
_SMALLEST_CHUNK_BYTES = 64 * 2**10
"""Smaller chunks stay in the cache, larger ones need fewer barriers; docs/log.md has the measurements."""
_COMPILED_CHUNK_BYTES = 256 * 2**10
"""The compiled barrier is so cheap that chunks may fit a core's own cache."""
_THREADED_BYTES = 256 * 2**10
"""Beyond this size torch's kernels are faster than the compiled loops, if a rank has several threads."""
_DIRECT_BYTES = 128 * 2**10
"""Up to this size every rank adds everything up by itself, which saves barriers."""
_SPIN_S, _CROWDED_SPIN_S = 2e-3, 5e-4
"""How long to spin before sleeping: waking up takes up to 0.4 ms, more than most waits last. With more ranks than
cores, a rank that spins takes time from the rank that it waits for."""
_NUM_AREAS = 2
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "ordered_reduce", "broadcast", "barrier")
_CODES = {name: number for number, name in enumerate(_COLLECTIVES)}


Steps = Iterator[tuple[int, str]]
"""A collective: yields the local ranks that it has to wait for, each with the collective's name."""


def area_bytes(size: int) -> int:
    """Return the size of each of the two staging areas, on a lane of so many ranks."""
    return size * _LARGEST_CHUNK_BYTES if size <= 2 else max(_AREA_BYTES, size * _SMALLEST_CHUNK_BYTES)


def chunk_bytes(size: int) -> int:
    """Return the size of a rank's slot of an area, on a lane of so many ranks."""
    return min(_LARGEST_CHUNK_BYTES, area_bytes(size) // size & -4096)


def block_bytes(size: int) -> int:
    """Return how much memory a lane of so many ranks takes."""
    return _staging_start(size) + _NUM_AREAS * area_bytes(size)


def _staging_start(size: int) -> int:
    semaphores = size * size * CELL_BYTES
    return Block.HEADER_BYTES + -(-semaphores // 4096) * 4096


def chunks_of(flat: torch.Tensor, num_bytes: int) -> Sequence[torch.Tensor]:
    """Cut a tensor into chunks of at most `num_bytes`, all of one size: a short one has as many barriers."""
    num_chunks = max(1, -(-flat.numel() * accumulation_dtype(flat.dtype).itemsize // num_bytes))
    chunks: Sequence[torch.Tensor] = flat.split(-(-flat.numel() // num_chunks))
    return chunks


class Lane:
    """The lane, seen from one of its ranks."""

    def __init__(
        self,
        block: Block,
        local_rank: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        timeout_s: float,
        engine: Engine | None,
        threads: int,
    ) -> None:
        """`engine`, and `threads`, the most that any rank computes with, are the same on all ranks."""
        self.size = len(ranks)
        self.local_rank = local_rank
        self._block = block
        self._chunk_bytes = chunk_bytes(self.size)
        self._engine, self._view = engine, self._view_of(block)
        self._compiled_bytes = 0 if engine is None else sys.maxsize if threads == 1 else _THREADED_BYTES
        """Up to which size the compiled loops do sums."""
        self._barrier: Barrier = CompiledBarrier(engine, self._view) if engine else PythonBarrier(self._view)
        self.peers = Peers(block, local_rank, ranks, pids, incoming(self._view), timeout_s)
        self._deadline_ns = NEVER_NS
        """Until when to spin for others, if that is sooner than the barrier would give up."""
        self._turn = 0
        self._ranks = ranks
        self._words = [self._words_of(local_rank) for local_rank in range(self.size)]
        self._count = 0
        """The collectives so far."""
        self._word = 0
        """What this rank is in, until the ranks have compared it; then 0."""
        self._areas: dict[torch.dtype, list[tuple[torch.Tensor, Sequence[torch.Tensor]]]] = {}
        self._accumulators: dict[torch.dtype, torch.Tensor] = {}

    def _view_of(self, block: Block) -> LaneView:
        crowded = self.size > len(os.sched_getaffinity(0))
        return LaneView(
            cells=block.pointer + Block.HEADER_BYTES,
            staging=block.pointer + _staging_start(self.size),
            size=self.size,
            local_rank=self.local_rank,
            slot_bytes=self._chunk_bytes,
            area_bytes=area_bytes(self.size),
            chunk_bytes=min(self._chunk_bytes, _COMPILED_CHUNK_BYTES),
            spin_ns=round(1e9 * (_CROWDED_SPIN_S if crowded else _SPIN_S)),
            crowded=crowded,
        )

    def _words_of(self, local_rank: int) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * 2).from_address(self._view.cells + local_rank * (self.size + 1) * CELL_BYTES)

    def _announce(self, what: str, num_bytes: int) -> None:
        """Write which collective this rank begins ([Note: The same collective]); one of no elements has no barrier."""
        if not num_bytes and what != "barrier":
            return
        self._count += 1
        self._word = num_bytes << 8 | _CODES[what] + 1
        self._words[self.local_rank][self._count & 1] = self._word

    def _compare(self) -> None:
        """Raise CollectiveMismatch if another rank is in another collective; called after the first barrier."""
        own, turn, self._word = self._word, self._count & 1, 0
        for local_rank, words in enumerate(self._words):
            if words[turn] != own:
                other = words[turn]
                called = _described(own, other)
                self.peers.break_off("ranks called different collectives.")
                raise CollectiveMismatch(
                    f"rank {self._ranks[self.local_rank]} called {called}, and rank {self._ranks[local_rank]} "
                    f"{_described(other, own)}. All ranks must call the same collectives in the same order.",
                    called,
                )

    def all_reduce(self, flat: torch.Tensor, how: Reduction = Reduction.SUM) -> Steps:
        """Combine the ranks' tensors, in place; contiguous and 1-D. Called on all ranks of the lane."""
        if self.size > 2 and flat.nbytes > _DIRECT_BYTES:
            yield from self.ring_all_reduce(flat, how, self.size, None, area_bytes(self.size))
            return
        if flat.nbytes <= self._compiled_bytes and how is Reduction.SUM and flat.dtype in KINDS:
            yield from self.all_reduce_coalesced((flat,))
            return
        self._announce("all_reduce", flat.nbytes)
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            slots = [slot[: piece.numel()] for slot in self._next_slots(piece.dtype)]
            slots[self.local_rank].copy_(piece)
            yield from self._synchronize("all_reduce")
            # All ranks do the same, so all hold the same bits. A rank's own elements are still in its cache.
            slots[self.local_rank] = piece
            self._combine(how, slots, piece)

    def can_coalesce(self, dtype: torch.dtype) -> bool:
        """Return whether `all_reduce_coalesced` supports a dtype; the same on all ranks of the lane."""
        return self._compiled_bytes == sys.maxsize and self.size == 2 and dtype in KINDS

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor]) -> Steps:
        """Sum several contiguous tensors in place, as if they were one; another rank may call `all_reduce` with that
        one. Called on all ranks of the lane.
        """
        assert self._engine is not None
        if self.peers.broken:
            self.peers.check()
        pieces, turn, moment = Pieces(tensors), self._turn, 0
        self._announce("all_reduce", pieces.num_bytes)
        self._turn ^= -(-pieces.num_bytes // self._view.chunk_bytes) & 1
        while (late := self._engine.sum(self._view, turn, pieces, moment, self._deadline_ns)) != ALL:
            if self._word and late > self.size:
                self._compare()  # before the next chunk, which a rank in another collective may not have
            yield late % (self.size + 1), "all_reduce"
            moment = late + 1
        if self._word:
            self._compare()
        tracked = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tracked)  # what autograd has saved of them is stale

    def ring_all_reduce(
        self,
        flat: torch.Tensor,
        how: Reduction,
        num_shares: int,
        reduce_share: Callable[[torch.Tensor], None] | None,
        num_bytes: int,
    ) -> Steps:
        """Combine the ranks' tensors, in place, by shares that go around ([Note: Ring through shared memory]); in
        chunks of `num_bytes`, at most `area_bytes`. Called on all ranks of the lane.

        Each of the first `num_shares` ranks completes one share, and calls `reduce_share` with it before the others
        copy it: the hierarchical all-reduce combines it with the other nodes' there.
        """
        dtype = accumulation_dtype(flat.dtype)
        self._announce("all_reduce", flat.nbytes)
        ready: tuple[torch.Tensor, torch.Tensor] | None = None
        for piece in chunks_of(flat, num_bytes):
            total = self._next_area(dtype)[: piece.numel()]
            length = -(-piece.numel() // num_shares)
            shares = list(zip(total.split(length), piece.split(length), strict=True))
            for turn in range(self.size):
                index = (self.local_rank - 1 - turn) % self.size  # at the last turn, its own
                if index < len(shares):
                    self._add_own(how, *shares[index], turn)
                    if turn == self.size - 1 and reduce_share is not None:
                        reduce_share(shares[index][0])
                if turn == 0 and ready is not None:  # the chunk before: no barrier of its own
                    ready[0].copy_(ready[1])
                yield from self._synchronize("all_reduce")
            ready = piece, total
        if ready is not None:
            ready[0].copy_(ready[1])

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], how: Reduction) -> Steps:
        """Combine, for each rank, the parts meant for it; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // out.element_size() // self.size
        self._announce("reduce_scatter", out.nbytes)
        for start in range(0, out.numel(), share):
            stop = min(start + share, out.numel())
            slots = self._next_slots(out.dtype)
            for other, part in enumerate(parts):
                slots[self.local_rank][other * share : other * share + stop - start].copy_(part[start:stop])
            yield from self._synchronize("reduce_scatter")
            first = self.local_rank * share
            self._combine(how, [slot[first : first + stop - start] for slot in slots], out[start:stop])

    def all_gather(self, outs: Sequence[torch.Tensor], own: torch.Tensor) -> Steps:
        """Collect the ranks' tensors; contiguous and 1-D. Called on all ranks of the lane."""
        share = self._chunk_bytes // own.element_size()
        self._announce("all_gather", own.nbytes)
        for start in range(0, own.numel(), share):
            piece = own[start : start + share]
            slots = self._next_slots(own.dtype)
            slots[self.local_rank][: piece.numel()].copy_(piece)
            yield from self._synchronize("all_gather")
            for slot, out in zip(slots, outs, strict=True):
                out[start : start + piece.numel()].copy_(slot[: piece.numel()])

    def ordered_reduce(self, own: Rows, counts: Sequence[int], add_up: AddUp, out: torch.Tensor) -> Steps:
        """Add up the ranks' rows, `counts` of them, in the caller's order: each rank a share of every chunk, in the
        staging area itself, from which the others copy it. Contiguous and 1-D. Called on all ranks of the lane.
        """
        length = self._chunk_bytes // out.element_size() // max(counts)
        self._announce("ordered_reduce", out.nbytes)
        for start in range(0, out.numel(), length):
            piece = out[start : start + length]
            slots = self._next_slots(out.dtype)
            for number, row in enumerate(own):
                slots[self.local_rank][number * length :][: piece.numel()].copy_(row[start : start + length])
            yield from self._synchronize("ordered_reduce")
            width = -(-piece.numel() // self.size)
            shares = [slice(width * other, width * (other + 1)) for other in range(self.size)]
            rows = [
                slot[n * length :][: piece.numel()]
                for slot, count in zip(slots, counts, strict=True)
                for n in range(count)
            ]
            total = add_up([row[shares[self.local_rank]] for row in rows])
            slots[self.local_rank][: piece.numel()][shares[self.local_rank]].copy_(total)
            yield from self._synchronize("ordered_reduce")
            for slot, share in zip(slots, shares, strict=True):
                piece[share].copy_(slot[: piece.numel()][share])

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrite the tensor with that of local rank `root`; contiguous and 1-D. Called on all ranks."""
        self._announce("broadcast", flat.nbytes)
        for piece in flat.split(self._chunk_bytes // flat.element_size()):
            slot = self._next_slots(flat.dtype)[root][: piece.numel()]
            if self.local_rank == root:
                slot.copy_(piece)
            yield from self._synchronize("broadcast")
            if self.local_rank != root:
                piece.copy_(slot)

    def barrier(self) -> Steps:
        """Wait until every rank is here. Called on all ranks of the lane."""
        self._announce("barrier", 0)
        yield from self._synchronize("barrier")

    def run(self, steps: Steps) -> None:
        """Run a collective to its end, and wait for as long as it takes."""
        try:
            for late in steps:
                self.peers.wait_for(*late)
        except BaseException:  # Ctrl-C, say: this rank and the others are out of step from here on
            self.peers.break_off("an operation was interrupted.")
            raise

    def begin(self, steps: Steps, spin_s: float) -> Callable[[], None] | None:
        """Run a collective until it has to wait; return the function that runs the rest, None if there is none."""
        self._deadline_ns = time.monotonic_ns() + round(1e9 * spin_s)
        try:
            late = next(steps, None)
        except BaseException:
            self.peers.break_off("an operation was interrupted.")
            raise
        finally:
            self._deadline_ns = NEVER_NS
        return None if late is None else lambda: self.run(chain([late], steps))

    def _add_own(self, how: Reduction, total: torch.Tensor, own: torch.Tensor, turn: int) -> None:
        if turn == 0:
            total.copy_(own)
        else:
            STEPS[how](total, own, out=total)
        if turn == self.size - 1 and how is Reduction.MEAN:
            divide(total, self.size)

    def _combine(self, how: Reduction, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        dtype = accumulation_dtype(out.dtype)
        if dtype not in self._accumulators:  # a chunk of two-byte elements has the most of them
            self._accumulators[dtype] = torch.empty(self._chunk_bytes // 2, dtype=dtype)
        combine(how, parts, out, self._accumulators[dtype])

    def _next_area(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the staging area of the next chunk."""
        if dtype not in self._areas:
            start = _staging_start(self.size)
            areas = self._block.bytes[start:].view(dtype).split(area_bytes(self.size) // dtype.itemsize)
            self._areas[dtype] = [
                (area, area.split(self._chunk_bytes // dtype.itemsize)[: self.size]) for area in areas
            ]
        self._turn ^= 1
        return self._areas[dtype][self._turn][0]

    def _next_slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the staging area of the next chunk, as a slot for each rank."""
        self._next_area(dtype)
        return list(self._areas[dtype][self._turn][1])

    def _synchronize(self, what: str) -> Steps:
        """Wait at a barrier."""
        if self.peers.broken:
            self.peers.check()
        self._barrier.arrive()
        late = ALL
        while (late := self._barrier.wait(late + 1, self._deadline_ns)) != ALL:
            yield late, what
        if self._word:
            self._compare()


def _described(word: int, other: int) -> str:
    """Return a collective in words; with its size, where only that differs from the other one."""
    name = _COLLECTIVES[(word & 0xFF) - 1]
    return f"{name} of {word >> 8} bytes" if word & 0xFF == other & 0xFF else name
