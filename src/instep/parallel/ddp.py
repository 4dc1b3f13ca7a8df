"""Data parallelism: the whole model on every rank, gradients all-reduced.

[Note: Our own reducer]
torch's DistributedDataParallel could carry most of the contract: a communication hook may add instead of taking means,
and with find_unused_parameters it leaves gradients alone that no rank has. It is not used because it is a wrapper: the
loss would see it in the place of the user's model, and all calls must go through its forward. It expects a backward
pass on every rank, and a part of weight 0 has none. Looking for unused parameters walks through the graph in every
step. Its buckets carry nothing else, so the step's loss and weight would cost a round trip more. And exact mode needs
hooks of its own anyway. So gradients are copied into flat buckets of our own; the step's sums and one flag for each
parameter follow those of the last bucket. Through shared memory there is one bucket for each dtype, reduced after
backward: one collective a step. Two ranks that share memory add gradients in place, without a bucket
(World.all_reduce_coalesced). Over a network there are many buckets, which travel while backward runs ([Note: Overlap]).
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.parallel.buckets import COUNTING, Bucket, fixed_buckets, plan_buckets
from instep.parallel.overlap import Overlap
from instep.parallel.strategy import NUM_SUMS, Reducer, StepSums, Strategy
from instep.world.tensors import row_on
from instep.world.world import World


class DdpReducer(Reducer):
    """All-reduces gradients; of DTensors, this rank's shard of each.

    `counted`: whether this rank's gradients count. If not, another rank with the same gradients counts in its place.
    `overlaps`: whether gradients may travel while backward runs, where that helps.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, counted: bool = True, overlaps: bool = False
    ) -> None:
        super().__init__(parameters)
        self._world, self._counted = world, counted
        self._overlap = Overlap(self.parameters, self._begin, keeps_last=True) if overlaps and world.overlaps else None
        self._channel = None if self._overlap is None else world.open_channel()
        self._same_used = True
        """Whether the ranks used the same parameters in the last step."""
        if self._overlap is not None and self._channel is None:
            self._set_buckets(fixed_buckets(self.parameters))
        else:
            self._set_buckets(plan_buckets(self.parameters, range(len(self.parameters)), sys.maxsize))

    def _set_buckets(self, plan: list[list[int]]) -> None:
        self._plan = plan
        num_extras = NUM_SUMS + 1 + len(self.parameters)
        *others, last = ([self.parameters[number] for number in bucket] for bucket in plan) if plan else [[]]
        carries = bool(last) and last[0].dtype in COUNTING
        self._buckets = [Bucket(group) for group in others] + ([Bucket(last, num_extras * carries)] if last else [])
        own = torch.zeros(0 if carries else num_extras, dtype=torch.float64, device=self._world.device)
        self._extras = self._buckets[-1].extras if carries else own
        """The step's sums, whether a rank must reduce again, then one flag for each parameter."""
        self._carries = carries
        """Whether the last bucket carries them; if not, its dtype is not precise enough."""

    def begin_last_backward(self) -> None:
        if self._overlap is None or not self._same_used or self._overlap.is_armed:
            return
        self._overlap.arm()
        if self._channel is not None and self._overlap.is_planned:
            for bucket in self._buckets:
                bucket.prepare(self._channel)

    def begin_reduce(self) -> None:
        if self._overlap is not None and self._overlap.is_planned:
            self._overlap.flush()

    def forget(self) -> None:
        if self._overlap is not None:  # no collective: a rank may begin its last part again by itself
            self._overlap.forget()

    def close(self) -> None:
        if self._overlap is not None:
            if self._overlap.is_planned:  # some ranks may have begun to send
                self._drain(self._overlap)
            self._overlap.close()

    def _drain(self, overlap: Overlap) -> None:
        """Complete what is on its way, for nothing. Called on all ranks."""
        if overlap.is_planned:
            overlap.flush()
            self._buckets[-1].fill()
            self._buckets[-1].begin_sum(self._world, self._channel)
            for bucket in self._buckets:
                bucket.sum(self._world)
        overlap.end()

    def _begin(self, number: int) -> None:
        self._buckets[number].fill()
        self._buckets[number].begin_sum(self._world, self._channel)

    def reduce(self, sums: StepSums) -> StepSums:
        overlap = self._overlap
        used = [p.grad is not None for p in self.parameters]
        is_stale = False
        if overlap is not None:
            self.begin_reduce()
            is_stale = overlap.end()
        for bucket in self._buckets:
            in_place = self._counted and self._world.can_coalesce(bucket.dtype) and bucket.take_in_place()
            if not in_place and not bucket.is_begun:
                bucket.fill(self._counted)
        array = _as_array(self._extras)
        row, on_cpu = (*sums.row(), float(is_stale)), self._extras.device.type == "cpu"
        array[: NUM_SUMS + 1] = row if on_cpu else row_on(row, self._extras.dtype, self._extras.device)
        array[NUM_SUMS + 1 :] = 1.0 if all(used) else torch.tensor(used, dtype=self._extras.dtype)
        seconds = self._sum()
        totals = array[: NUM_SUMS + 1].tolist()
        if totals[-1]:  # a gradient has changed since its bucket began, on some rank
            assert overlap is not None
            overlap.close()
            self._overlap = None
            return self.reduce(sums)
        # Reading the counts waits for the GPU; a rank that used every parameter knows them already.
        counts = array[NUM_SUMS + 1 :].tolist() if overlap is not None or not all(used) else [1.0] * len(used)
        for numbers, bucket in zip(self._plan, self._buckets, strict=True):
            bucket.adopt([counts[number] > 0 for number in numbers])
        if overlap is not None:
            self._same_used = all(count in (0.0, float(self._world.world_size)) for count in counts)
            if not overlap.is_planned and (buckets := overlap.plan(self._world, seconds, self._channel)):
                self._set_buckets(buckets)
            self._overlap = None if overlap.is_closed else overlap
            if self._channel is not None:
                overlap.choose_coding(self._world, self._channel, lambda: (bucket.flat for bucket in self._buckets))
        return StepSums.of(totals[:NUM_SUMS])

    def _sum(self) -> float:
        """All-reduce what has not begun, with the extras; return how long that took if it is to be known."""
        begun = 0.0
        if self._overlap is not None:
            if not self._overlap.is_planned:
                self._world.barrier()
                begun = time.perf_counter()
            for bucket in self._buckets:
                if not bucket.is_begun:
                    bucket.begin_sum(self._world, self._channel)
        for bucket in self._buckets:
            bucket.sum(self._world)
        if not self._carries:
            self._world.all_reduce(self._extras)
        return time.perf_counter() - begun


def _as_array(tensor: torch.Tensor) -> Any:
    """Return a small CPU tensor as a NumPy array in the same memory, which is many times as fast to index."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


class Ddp(Strategy):
    """The whole model on every rank."""

    name = "ddp"
    allows_channels_last = True
    compiles_by_default = True
    axes = ("dp",)

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        # Where collectives are matched by their order, those of layers in backward must not meet the buckets: a rank
        # that does not use a parameter begins its bucket later than the others.
        world = self.grid.data
        return DdpReducer(parameters, world, overlaps=world.has_channels or not self.context.connected)
