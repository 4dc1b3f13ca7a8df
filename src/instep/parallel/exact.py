"""Exact mode: gradients whose bits do not depend on the number of ranks.

[Note: Exact mode]
The global batch is cut into shards that depend on the spec alone. A rank computes consecutive shards, each with its own
forward and backward pass. A shard's gradient depends only on the shard: its samples, its noise, the number of threads,
deterministic kernels. The gradients are added over the canonical tree of the shards ([Note: Canonical tree]): a rank
adds its own as they come, the ranks exchange the remaining subtrees, and all add those. The step's other sums (loss,
weights) are kept by shard and added in the order of the shards. A world of one rank does the same.

Between nodes, through channels of their own, a rank's subtrees travel while the backward pass of its last shard runs
([Note: Overlap]): when a bucket of its gradient is ready, that bucket of the subtrees is complete, and is exchanged.
What travels is a copy: if a gradient changes after that (a second backward pass for the same part), everything is added
up once more, after backward.
"""

import time
from collections.abc import Sequence

import torch
from torch import nn

from instep.core.tree import Node, TreeSum, cover, run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import replace_dropout
from instep.parallel.gradients import by_dtype, copy_gradients
from instep.parallel.memory_format import view_like
from instep.parallel.norm import gather_by_shard, use_shard_statistics
from instep.parallel.overlap import Overlap
from instep.parallel.strategy import NUM_SUMS, ModelHints, Reducer, StepSums, Strategy
from instep.world.determinism import prepare_deterministic
from instep.world.exchange import Reduction
from instep.world.world import World


class _FlatGradients:
    """The gradients of all parameters, one flat buffer for each dtype; buckets of parameters are slices of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: Sequence[Sequence[int]]) -> None:
        self.buckets = buckets
        self.flats: list[torch.Tensor] = []
        self.slices: list[tuple[int, slice]] = []
        """Of each bucket, its flat buffer and where it is in it."""
        pieces: dict[nn.Parameter, torch.Tensor] = {}
        in_order = [parameters[number] for bucket in buckets for number in bucket]
        for dtype, group in by_dtype(in_order).items():
            sizes = [p.numel() for p in group]
            self.flats.append(torch.empty(sum(sizes), dtype=dtype, device=group[0].device))
            pieces |= zip(group, self.flats[-1].split(sizes), strict=True)
        self.views = [view_like(pieces[p], p) for p in parameters]
        ends = [0] * len(self.flats)
        index_of = {flat.dtype: index for index, flat in enumerate(self.flats)}
        for bucket in buckets:
            index = index_of[parameters[bucket[0]].dtype]
            start, ends[index] = ends[index], ends[index] + sum(parameters[number].numel() for number in bucket)
            self.slices.append((index, slice(start, ends[index])))

    def bucket(self, number: int) -> torch.Tensor:
        """Return a bucket's elements, in the same memory."""
        index, where = self.slices[number]
        return self.flats[index][where]


class ExactReducer(Reducer):
    """Adds the shards' gradients over their canonical tree ([Note: Exact mode])."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, context: BatchContext, overlaps: bool = False
    ) -> None:
        super().__init__(parameters)
        self._world, self._context = world, context
        self._channel = world.open_channel() if overlaps else None
        self._overlap = Overlap(self.parameters, self._begin) if self._channel is not None else None
        self._buckets = [list(range(len(self.parameters)))]
        self._next_buckets: list[list[int]] = []
        """From the next step on."""
        self._free: list[_FlatGradients] = []
        """For reuse: allocating them in every step would cost more than the additions."""
        self._passes: list[TreeSum[_FlatGradients]] = []
        self._counted: list[list[list[float | torch.Tensor]]] = []
        """By pass and shard: the step's sums, then which parameters the shard used."""
        self._total: _FlatGradients | None = None
        """What the parameters' gradients are views of."""
        self._last: _FlatGradients | None = None
        """The gradient of the shard whose backward pass runs, where buckets of it travel already."""
        self._kept: tuple[Node, _FlatGradients] | None = None
        """The same, when its backward pass is over."""
        self._sent: list[_FlatGradients] = []
        """Copies of this rank's subtrees, which travel."""
        self._out: _FlatGradients | None = None
        """What receives the total of the buckets on their way."""
        self._prepared: list[Reduction] = []
        """Of the buckets that have not begun."""
        self._pending: list[Reduction] = []

    def forget(self) -> None:
        self._free += [gradients for subtotal in self._passes for _, gradients in subtotal.parts]
        if self._total is not None:
            self._free.append(self._total)
        self._passes, self._counted, self._total = [], [], None
        if self._overlap is not None:
            self._overlap.forget()

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()

    def _allocate(self) -> _FlatGradients:
        while self._free:
            gradients = self._free.pop()
            if gradients.buckets is self._buckets:  # not of an earlier layout
                return gradients
        return _FlatGradients(self.parameters, self._buckets)

    def _add(self, left: _FlatGradients, right: _FlatGradients) -> _FlatGradients:
        for one, other in zip(left.flats, right.flats, strict=True):
            one.add_(other)
        self._free.append(right)
        return left

    def begin_last_backward(self) -> None:
        overlap = self._overlap
        # One pass over the shards overlaps; those after it do not.
        if overlap is None or overlap.is_armed or self._pending or len(self._passes) > 1 or self._repeats():
            return
        overlap.arm()
        if overlap.is_planned:
            self._last = self._allocate()
            self._prepare(self._last)

    def _prepare(self, like: _FlatGradients) -> None:
        """Be ready for the other ranks' subtrees."""
        assert self._channel is not None
        counts = self._counts()
        self._prepared = [self._channel.prepare(like.bucket(i), counts) for i in range(len(self._buckets))]

    def _repeats(self) -> bool:
        """Return whether the current shard is one that this step has had before."""
        if not self._passes:
            return False
        is_kept = self._kept is not None and len(self._passes) == 1
        return self._context.shard < (self._kept if is_kept else self._passes[-1].parts[-1])[0][1]  # type: ignore[index]

    def end_shard(self, sums: StepSums) -> None:
        """Take a shard's gradient and its sums."""
        if not self._passes or self._repeats():
            self._passes.append(TreeSum(self._context.num_shards, self._add))
            self._counted.append([])
        grads = [p.grad for p in self.parameters]
        node, is_stale = (self._context.shard, self._context.shard + 1), False
        if self._last is not None:
            assert self._overlap is not None
            self._overlap.flush()
            is_stale = self._overlap.end()
            if is_stale:
                copy_gradients(self._last.views, grads)
            self._kept, self._last = (node, self._last), None
        else:
            if self._overlap is not None and self._overlap.is_armed:  # watched, for a plan
                self._overlap.end()
            gradients = self._allocate()
            copy_gradients(gradients.views, grads)
            self._passes[-1].put(node, gradients)
        self._counted[-1].append([*sums.row(), *(float(grad is not None) for grad in grads), float(is_stale)])
        for p in self.parameters:
            p.grad = None

    def _begin(self, number: int) -> None:
        """Begin to add up a bucket of all ranks' subtrees of the first pass. Called on all ranks."""
        parts = [
            (node, gradients.bucket(number)) for node, gradients in (self._passes[0].parts if self._passes else ())
        ]
        if self._last is not None:
            held = [self._last.views[i] for i in self._buckets[number]]
            with torch.no_grad():
                copy_gradients(held, [self.parameters[i].grad for i in self._buckets[number]])
            parts.append(((self._context.shard, self._context.shard + 1), self._last.bucket(number)))
        rows = self._copied_sums(parts, number)
        reduction = self._prepared.pop(0)
        if self._counts() == [1, 1]:  # two halves: the order of two terms does not matter
            self._pending.append(reduction.begin_sum(rows[0]))
            return
        if self._out is None:
            self._out = self._allocate()
        self._pending.append(reduction.begin(rows, self._add_tree, self._out.bucket(number)))

    def _copied_sums(self, parts: Sequence[tuple[Node, torch.Tensor]], number: int) -> list[torch.Tensor]:
        """Return a bucket of this rank's subtrees in the memory of `_sent`; `parts` stay as they are."""
        copies: list[torch.Tensor] = []

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            # The last shard is added to one part after the other, from right to left: there is one copy at a time.
            if not any(right is copied for copied in copies):
                copies.append(self._copy(len(copies), number))
                return torch.add(left, right, out=copies[-1])
            return right.add_(left)

        own = TreeSum[torch.Tensor](self._context.num_shards, add)
        for node, part in parts:
            own.put(node, part)
        for index, (node, row) in enumerate(own.parts):
            if not any(row is copied for copied in copies):
                copies.append(self._copy(len(copies), number).copy_(row))
                own.parts[index] = (node, copies[-1])
        return [row for _, row in own.parts]

    def _copy(self, index: int, number: int) -> torch.Tensor:
        if index == len(self._sent):
            self._sent.append(self._allocate())
        return self._sent[index].bucket(number)

    def reduce(self, sums: StepSums) -> StepSums:
        # The step's sums, how many shards used each parameter, how many shards were changed after they had been sent.
        totals = torch.zeros(NUM_SUMS + len(self.parameters) + 1, dtype=torch.float64)
        num_passes = len(self._passes)
        if self._context.num_shards < self._world.world_size:  # a rank without a shard may have sums, too
            local_sums = [] if self._passes else [float(value) for value in sums.row()]
            by_rank = self._world.all_gather_object([num_passes, local_sums])
            num_passes = max(passes for passes, _ in by_rank)
            for rank_sums in filter(None, (rank_sums for _, rank_sums in by_rank)):
                totals[:NUM_SUMS] += torch.tensor(rank_sums, dtype=torch.float64)
        total: _FlatGradients | None = None
        for number in range(num_passes):
            counted = self._counted[number] if number < len(self._counted) else []
            parts = self._passes[number].parts if number < len(self._passes) else []
            by_shard = gather_by_shard(_to_cpu(counted, len(totals)), self._world, self._context.num_shards)
            totals += sum(by_shard.unbind())  # from the first to the last
            subtrees = [gradients for _, gradients in parts]
            if number == 0 and self._overlap is not None:
                root = self._add_overlapped(subtrees, self._overlap, is_stale=bool(by_shard[:, -1].any()))
            else:
                root = self._add_subtrees(subtrees)
            total = root if total is None else self._add(total, root)
        self._passes, self._counted = [], []
        if total is not None:
            for p, view, count in zip(self.parameters, total.views, totals[NUM_SUMS:-1].tolist(), strict=True):
                p.grad = view if count > 0 else None
        self._total = total
        self._buckets, self._next_buckets = self._next_buckets or self._buckets, []
        return StepSums.of(totals[:NUM_SUMS].tolist())

    def _counts(self) -> list[int]:
        """Return how many subtrees each rank has."""
        num_shards, size = self._context.num_shards, self._world.world_size
        return [len(cover(*run_of(rank, size, num_shards), num_shards)) for rank in range(size)]

    def _add_tree(self, subtrees: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' subtrees, by rank."""
        num_shards, size = self._context.num_shards, self._world.world_size
        total = TreeSum[torch.Tensor](num_shards, lambda left, right: left.add_(right))
        nodes = (node for rank in range(size) for node in cover(*run_of(rank, size, num_shards), num_shards))
        for node, subtree in zip(nodes, subtrees, strict=True):
            total.put(node, subtree)
        return total.parts[0][1]

    def _add_overlapped(self, parts: list[_FlatGradients], overlap: Overlap, is_stale: bool) -> _FlatGradients:
        """Return the sum of all ranks' subtrees, whose buckets may be on their way. Called on all ranks.

        `is_stale`: a rank's gradient has changed since it was sent.
        """
        if not overlap.is_planned:
            self._world.barrier()
            begun = time.perf_counter()
            total = self._add_subtrees(parts)
            self._next_buckets = overlap.plan(self._world, time.perf_counter() - begun, self._channel)
            self._overlap = None if overlap.is_closed else overlap
            return total
        if not self._pending:  # the rank has no shard, or its last one was not watched
            if not parts:
                self._out = self._allocate()
            self._prepare(self._out or parts[0])
            for number in range(len(self._buckets)):
                self._begin(number)
        for pending in self._pending:
            self._world.wait(pending)
        total, sent, kept = self._out or self._sent[0], self._sent, self._kept
        self._pending, self._out, self._sent, self._kept = [], None, [], None
        if is_stale:
            overlap.close()
            self._overlap = None
            self._free += {*sent, total}
            if kept is not None:
                self._passes[0].put(*kept)
            return self._add_subtrees([gradients for _, gradients in self._passes[0].parts] if self._passes else [])
        if self._channel is not None:
            overlap.choose_coding(self._world, self._channel, lambda: total.flats)
        self._free += [
            *parts,
            *([] if kept is None else [kept[1]]),
            *(copied for copied in sent if copied is not total),
        ]
        return total

    def _add_subtrees(self, parts: list[_FlatGradients]) -> _FlatGradients:
        """Return the sum of all ranks' subtrees. Called on all ranks."""
        if self._world.world_size == 1:
            return parts[0]
        counts = self._counts()
        if counts == [1, 1]:  # two halves: the order of two terms does not matter
            for flat in parts[0].flats:
                self._world.all_reduce(flat)
            return parts[0]
        total = self._allocate()
        for number, out in enumerate(total.flats):
            self._world.ordered_reduce([gradients.flats[number] for gradients in parts], counts, self._add_tree, out)
        self._free += parts
        return total


def _to_cpu(rows: list[list[float | torch.Tensor]], width: int) -> torch.Tensor:
    """Return rows of values on the CPU. A device's are copied together: each copy waits for the device."""
    flat = [value for row in rows for value in row]
    tensors = [value.detach().double() for value in flat if isinstance(value, torch.Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else [])
    numbers = [next(copied) if isinstance(value, torch.Tensor) else value for value in flat]
    return torch.tensor(numbers, dtype=torch.float64).view(-1, width)


class Exact(Strategy):
    """The whole model on every rank, with the same bits at any number of ranks."""

    name = "exact"
    is_exact = True

    def spread(self, model: nn.Module, hints: ModelHints) -> nn.Module:
        prepare_deterministic(self.grid.world.device)
        return super().spread(model, hints)

    def replace_layers(self, model: nn.Module) -> nn.Module:
        model = replace_dropout(model, self.context)
        use_shard_statistics(model, self.context)
        return model

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # On CPU, fused kernels round the last few elements of a tensor differently from the rest, so a sharded
        # parameter would not be updated as the whole one is (seen with SGD).
        if self.grid.world.device.type == "cpu":
            for group in optimizer.param_groups:
                if group.get("fused"):
                    group["fused"] = optimizer.defaults["fused"] = False

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return ExactReducer(parameters, self.grid.data, self.context, overlaps=True)
