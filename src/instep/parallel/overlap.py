"""Reductions that begin while backward runs.

[Note: Overlap]
Over a network, gradients travel while backward computes the next ones. They are cut into buckets in the order in which
they become ready; all ranks begin the buckets in that order, each as soon as its gradients are ready here. What is not
ready in backward (a parameter without gradient, a part of weight 0) begins after it.

The first step reduces after backward: it shows the order (one rank's counts for all), and how fast the link is. Buckets
are then large enough that beginning one costs little, and small enough that the last one, which nothing hides, is
short. Where sums would depend on the cut, it follows from the parameters alone, in every step: a run that is restarted
must not add in another order. Which bucket begins first changes no sum: a parameter that gets no gradient holds up its
own bucket only.

Where the link is slower than backward, gradients are coded ([Note: Fewer bytes]), if that is faster: after a few steps
the codec is tried on a step's gradients, and its time and what it saves are compared with those of link and backward.

A gradient that changes after its bucket has begun (a second backward pass for the same part, code that edits gradients)
is noticed: the ranks reduce once more, after backward, and from then on always do. An edit of `p.grad.data` is noticed
in the first step only. Where collectives are matched by their order (on GPUs, and with several ranks on each of
several nodes), models whose layers communicate in backward do not overlap. Steps in which the ranks did not use the
same parameters are followed by one that reduces after backward.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from instep.parallel.buckets import bucket_bytes, fixed_buckets, in_order_of_readiness, plan_buckets
from instep.parallel.gradients import to_local
from instep.world.exchange import Channel
from instep.world.world import World

_MAX_PLANS = 3
"""How many steps are watched for an order."""
_STEPS_BEFORE_CODING = 3
"""How many steps show how long backward takes, before it is decided whether to code."""
_WORTH_CODING = 0.97
"""Coding must save so much of the time."""


class Overlap:
    """Notices when gradients are ready, and begins their buckets in order."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], begin: Callable[[int], None], keeps_last: bool = False
    ) -> None:
        """`keeps_last`: the last bucket waits for the step's sums, and is not begun here."""
        self._parameters, self._begin, self._keeps_last = list(parameters), begin, keeps_last
        self.order: list[int] = []
        """The parameters' numbers in the order in which the last backward pass had their gradients ready."""
        self.buckets: list[list[int]] = []
        """The parameters' numbers, in the order in which all ranks begin the buckets; empty until `plan`."""
        self.num_begun = 0
        """How many buckets have begun in this step."""
        self.is_closed = False
        self._num_plans = self._num_watched = 0
        self._armed_at = 0.0
        self._backward_s: list[float] = []
        """How long the backward passes took that were watched."""
        self._contents: dict[int, float] = {}
        self._was_edited = False
        """Whether a gradient changed after backward, in the last step before the plan."""
        self._link_s = 0.0
        """How long it took to reduce everything after backward."""
        self._num_to_begin = 0
        self._bucket_of: list[int] = []
        self._missing: list[int] = []
        self._versions: list[tuple[nn.Parameter, Any, int]] = []
        self.is_armed = self._is_stale = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._ready, number))
            for number, p in enumerate(parameters)
            if p.requires_grad
        ]

    def plan(self, world: World, seconds: float, channel: Channel | None) -> list[list[int]]:
        """Cut buckets, given how long it took to reduce everything; return them, if there are any. Called on all ranks.

        The last rank's order counts for all: it has a shard in exact mode, however few there are.
        """
        self._num_plans += 1
        told = [self.order, seconds, self._was_edited]
        order, seconds, was_edited = world.broadcast_object(told, source=world.world_size - 1)
        if not order:  # it had no backward pass, or there are several models
            if self._num_plans == _MAX_PLANS:
                self.close()
            return []
        if len(set(order)) < len(order) or was_edited:  # a parameter gets its gradient bit by bit
            self.close()
            return []
        self._link_s, num_bytes = seconds, sum(p.nbytes for p in self._parameters)
        if channel is None:
            self.buckets = in_order_of_readiness(fixed_buckets(self._parameters), order)
        else:
            channel.forget_buffers()
            self.buckets = plan_buckets(self._parameters, order, bucket_bytes(num_bytes / seconds))
        of = {number: i for i, bucket in enumerate(self.buckets) for number in bucket}
        self._bucket_of = [of[number] for number in range(len(self._parameters))]
        self._num_to_begin = len(self.buckets) - self._keeps_last
        return self.buckets

    def choose_coding(self, world: World, channel: Channel, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Decide after some steps whether a channel is coded; `gradients` are a step's. Called on all ranks."""
        self._num_watched += self.is_planned
        if channel.codec is None or self._num_watched != _STEPS_BEFORE_CODING:
            return
        codec, num_bytes, num_coded, begun = channel.codec, 0, 0, time.perf_counter()
        for floats in (gradient for gradient in gradients() if gradient.dtype == torch.float32):
            buffer = torch.empty(codec.bound(floats.numel()), dtype=torch.uint8)
            num_bytes, num_coded = num_bytes + floats.nbytes, num_coded + codec.encode(floats, buffer).numel()
            codec.decode(buffer, torch.empty_like(floats))
        coding_s = time.perf_counter() - begun
        backward_s = statistics.median(self._backward_s) if self._backward_s else math.inf
        saved = (num_bytes - num_coded) / sum(p.nbytes for p in self._parameters)
        plain_s, coded_s = max(backward_s, self._link_s), max(backward_s + coding_s, self._link_s * (1 - saved))
        channel.is_coded = world.broadcast_object(coded_s < _WORTH_CODING * plain_s, source=world.world_size - 1)
        channel.forget_buffers()

    @property
    def is_planned(self) -> bool:
        """Whether there are buckets."""
        return bool(self.buckets)

    def arm(self) -> None:
        """Watch the backward pass that follows: the last one of a step."""
        self.order, self._missing = [], [len(bucket) for bucket in self.buckets]
        self.is_armed, self._is_stale = True, False
        self._armed_at = time.perf_counter()

    def forget(self) -> None:
        """Watch the backward pass again; what has begun is reduced once more, on all ranks. Issues no collective."""
        if self.is_armed:
            self.order, self._contents, self._missing = [], {}, [len(bucket) for bucket in self.buckets]
            self._is_stale |= self.num_begun > 0

    def flush(self) -> None:
        """Begin all buckets, ready or not: backward is over."""
        while self.num_begun < self._num_to_begin:
            self._begin_next()

    def end(self) -> bool:
        """End the step; return whether a gradient has changed after its bucket had begun."""
        changed = any(p.grad is not grad or _version(grad) != version for p, grad, version in self._versions)
        is_stale = self._is_stale or changed
        if self.is_armed and self.is_planned and self._num_watched < _STEPS_BEFORE_CODING:
            self._backward_s.append(time.perf_counter() - self._armed_at)
        # An edit of `p.grad.data` leaves no trace: a loop that makes one in its first step is found by the content.
        self._was_edited = any(_content(self._parameters[i]) != content for i, content in self._contents.items())
        self._contents = {}
        self.is_armed, self._is_stale, self.num_begun, self._versions = False, False, 0, []
        return is_stale

    def close(self) -> None:
        """Notice nothing any more."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()

    def _ready(self, number: int, _parameter: nn.Parameter) -> None:
        if not self.is_armed:
            return
        self.order.append(number)
        if not self.buckets:
            self._contents[number] = _content(self._parameters[number])
            return
        bucket = self._bucket_of[number]
        self._is_stale |= bucket < self.num_begun
        self._missing[bucket] -= 1
        while self.num_begun < self._num_to_begin and self._missing[self.num_begun] <= 0:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self.num_begun]
        held = [self._parameters[number] for number in bucket]
        self._versions += [(p, p.grad, _version(p.grad)) for p in held]
        self._begin(self.num_begun)
        self.num_begun += 1


def _content(parameter: nn.Parameter) -> float:
    """Return a number that changes if a gradient does; the same for any NaN."""
    grad = parameter.grad
    if grad is None:
        return -1.0
    total = float(to_local(grad.to_dense() if grad.is_sparse else grad).double().square().sum())
    return total if math.isfinite(total) else -2.0


def _version(grad: Any) -> int:
    return 0 if grad is None else grad._version
