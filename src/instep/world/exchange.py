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
idle. A message is sent when the receiver has told that it is ready for it, and that word waits its turn behind all that
is already on its way; so receives are posted ahead where it is known what will come. Each message has a tag of its own:
a channel's reductions are matched by their order in it, whatever else the group does in between. What the caller waits
for at once it computes itself, since the thread may have to wait for a rank that waits for the caller.

A channel may be coded ([Note: Fewer bytes]): a second thread codes what is sent, so that no reduction waits for the
coding of another one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from instep.world.background import Background, Pending
from instep.world.float_codec import FloatCodec, load_codec
from instep.world.lane.reduction import AddUp, Rows, accumulation_dtype

_NUM_TAGS = 2**16
"""Tags of one channel are reused after so many; by then their messages have long arrived."""


class Exchange:
    """Reduces CPU tensors of ranks on different nodes ([Note: Reductions in the background])."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        """None once this has ended."""
        self.rank, self.size = group.rank(), group.size()
        self.others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        """Beginning with the next one, so that not all send to the same rank first."""
        self.background, self.sender = Background(), Background()
        self.free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        """For reuse: memory that the system has just given out is slow to write to."""
        has_codec = torch.tensor(int((codec := load_codec()) is not None))
        dist.all_reduce(has_codec, dist.ReduceOp.MIN, group)
        self.codec = codec if has_codec else None
        """None: some rank has none."""
        self.reductions: weakref.WeakSet[Reduction] = weakref.WeakSet()
        """Those that somebody still refers to."""
        self._channels = itertools.count(1)  # tags below the first channel's are users'
        self._now = self.open_channel()
        self._now.keeps_buffers = False  # of any size: they would pile up

    def open_channel(self) -> Channel:
        """Open a channel. Called on all ranks, in the same order."""
        return Channel(self, next(self._channels) * _NUM_TAGS)

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum a contiguous 1-D tensor over all ranks, in place. Called on all ranks."""
        reduction = self._now.prepare(flat)
        reduction.send([flat])
        reduction.finish([flat], reduction.sum_in_order, flat)
        reduction.wait_for_totals()

    def shares(self, length: int) -> list[slice]:
        """Return which elements each rank adds up: all of them where there are two ranks."""
        if self.size == 2:
            return [slice(0, length)] * 2
        bounds = [length * rank // self.size for rank in range(self.size + 1)]
        return [slice(*pair) for pair in itertools.pairwise(bounds)]

    def end(self) -> None:
        """End the threads, once they have nothing to do, and let go of the group."""
        self.background.end()
        self.sender.end()
        for reduction in self.reductions:  # messages that are expected would keep the connections open
            reduction.drop()
        self.group = None

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor with any content."""
        try:
            return self.free[count, dtype].pop()
        except (KeyError, IndexError):
            return torch.empty(count, dtype=dtype)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors for reuse."""
        for tensor in tensors:
            self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


class Channel:
    """Reductions that are matched by their order."""

    def __init__(self, exchange: Exchange, first_tag: int) -> None:
        self._exchange, self._first_tag = exchange, first_tag
        self._number = 0
        self.codec = exchange.codec
        self.is_coded = False
        """Whether float32 is coded from now on; set to the same on all ranks, between reductions."""
        self.keeps_buffers = True

    def forget_buffers(self) -> None:
        """Free the memory that was kept for reuse: other sizes will be needed from now on."""
        self._exchange.free.clear()

    def prepare(self, like: torch.Tensor, counts: Sequence[int] | None = None) -> Reduction:
        """Be ready for a reduction of 1-D tensors as long as `like`; rank r has `counts[r]` of them, or one."""
        self._number = (self._number + 1) % (_NUM_TAGS // 2)
        codec = self.codec if self.is_coded and like.dtype == torch.float32 else None
        tag = self._first_tag + 2 * self._number
        counts = counts or [1] * self._exchange.size
        return Reduction(self._exchange, tag, like, counts, codec, self.keeps_buffers)


class Reduction:
    """A reduction, for which this rank is ready to receive; `begin` sends this rank's rows."""

    def __init__(
        self,
        exchange: Exchange,
        tag: int,
        like: torch.Tensor,
        counts: Sequence[int],
        codec: FloatCodec | None,
        keeps_buffers: bool,
    ) -> None:
        exchange.reductions.add(self)
        self._keeps_buffers = keeps_buffers
        self._exchange, self._tag, self._codec, self._dtype = exchange, tag, codec, like.dtype
        self._shares = exchange.shares(like.numel())
        self._mine = self._shares[exchange.rank]
        length = self._mine.stop - self._mine.start
        self._received = {rank: [self._take(length) for _ in range(counts[rank])] for rank in exchange.others}
        self._receives = [self._receive(row, rank, tag) for rank, rows in self._received.items() for row in rows]
        self._sends: list[Any] = []
        self._sent: list[torch.Tensor] = []
        """The messages on their way."""
        self._totals: list[Any] = []
        self._coded_totals: dict[int, torch.Tensor] = {}
        self._out = like
        self._sending: Pending | None = None
        self._pending: Pending | None = None

    def drop(self) -> None:
        """Forget the messages that are on their way: nobody waits for them any more."""
        self._receives, self._sends, self._totals = [], [], []

    def begin_sum(self, flat: torch.Tensor) -> Reduction:
        """Begin to sum a tensor in place."""
        return self.begin([flat], self.sum_in_order, flat)

    def begin(self, own: Rows, add_up: AddUp, out: torch.Tensor) -> Reduction:
        """Begin to reduce rows as `World.ordered_reduce` does; `own` is written to, and `out` may be one of them."""
        if self._codec is None:
            self.send(own)
        else:
            self._sending = self._exchange.sender.submit(lambda: self.send(own), None)
        self._pending = self._exchange.background.submit(lambda: self.finish(own, add_up, out), None)
        return self

    def wait(self) -> None:
        """Wait until the total is there; raise the error that prevented it."""
        assert self._pending is not None
        self._pending.wait()
        self.wait_for_totals()

    def send(self, own: Rows) -> None:
        """Send this rank's rows, to each rank its share."""
        self._sends = [
            self._send(self._message(row[self._shares[rank]]), rank, self._tag)
            for rank in self._exchange.others
            for row in own
        ]

    def finish(self, own: Rows, add_up: AddUp, out: torch.Tensor) -> None:
        """Wait for the other ranks' rows, add this rank's share up, and send it to all."""
        _wait(self._receives)
        if self._sending is not None:
            self._sending.wait()
        _wait(self._sends)  # adding may write to what is sent
        self._give_back_messages()
        exchange, mine, self._out = self._exchange, out[self._mine], out
        if self._codec is not None and exchange.size == 2 and add_up == self.sum_in_order and mine.numel():
            self._codec.decode(self._received[1 - exchange.rank][0], mine, add=True)
            self._give_back(itertools.chain(*self._received.values()))
            return
        received = {rank: [self._decoded(row) for row in rows] for rank, rows in self._received.items()}
        rows = {**received, exchange.rank: [row[self._mine] for row in own]}
        total = add_up([row for rank in range(exchange.size) for row in rows[rank]])
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        self._give_back(itertools.chain(*received.values()))
        if exchange.size > 2:
            self._exchange_totals(mine)

    def _exchange_totals(self, mine: torch.Tensor) -> None:
        exchange, tag, out = self._exchange, self._tag + 1, self._out
        for rank in exchange.others:
            share = out[self._shares[rank]]
            into = share if self._codec is None else self._take(share.numel())
            if self._codec is not None:
                self._coded_totals[rank] = into
            self._totals.append(self._receive(into, rank, tag))
        message = self._message(mine)
        self._totals += [self._send(message, rank, tag) for rank in exchange.others]

    def wait_for_totals(self) -> None:
        """Wait for the other ranks' shares, after `finish`."""
        _wait(self._totals)
        self._give_back_messages()
        for rank, buffer in self._coded_totals.items():
            share = self._out[self._shares[rank]]
            if self._codec is not None and share.numel():
                self._codec.decode(buffer, share)
        self._give_back(self._coded_totals.values())

    def sum_in_order(self, rows: Rows) -> torch.Tensor:
        """Return the sum in the order of the ranks."""
        if self._exchange.size == 2:  # two terms have no order: this rank's own is where the sum belongs
            return rows[self._exchange.rank].add_(rows[1 - self._exchange.rank])
        total = rows[0].to(accumulation_dtype(rows[0].dtype))
        for row in rows[1:]:
            total.add_(row)
        return total

    def _take(self, count: int) -> torch.Tensor:
        """Return what receives so many elements."""
        if self._codec is None or not count:
            return self._exchange.take(count, self._dtype)
        return self._exchange.take(self._codec.bound(count), torch.uint8)

    def _message(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements as they are sent."""
        if self._codec is None or not elements.numel():
            return elements
        self._sent.append(self._exchange.take(self._codec.bound(elements.numel()), torch.uint8))
        return self._codec.encode(elements, self._sent[-1])

    def _decoded(self, message: torch.Tensor) -> torch.Tensor:
        """Return received elements as they were."""
        if self._codec is None or not message.numel():
            return message
        elements = self._exchange.take(self._mine.stop - self._mine.start, self._dtype)
        self._codec.decode(message, elements)
        self._give_back([message])
        return elements

    def _give_back_messages(self) -> None:
        self._give_back(self._sent)
        self._sent = []

    def _give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._keeps_buffers:
            self._exchange.give_back(tensors)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        assert self._exchange.group is not None
        return self._exchange.group.send([tensor], rank, tag) if tensor.numel() else None

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        assert self._exchange.group is not None
        return self._exchange.group.recv([tensor], rank, tag) if tensor.numel() else None


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
