"""Exact mode: gradients whose bits do not depend on the number of ranks.

[Note: Exact mode]
The global batch is cut into shards that depend on the spec alone. A rank works through a run of neighbouring shards,
each with a forward and a backward pass of its own, and a shard's gradient depends on nothing else: its samples, its
noise, the number of threads, deterministic kernels. The gradients are added up over the canonical tree of the shards
([Note: Canonical tree]): a rank adds its own up as they come, the ranks exchange what is left, and all add that up.
What a step counts besides (loss, weights) is kept by shard and added up in the order of the shards. A world of one
takes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from instep.core.tree import TreeSum, cover, run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import own_dropout
from instep.parallel.shard_norm import own_batch_norm
from instep.parallel.strategy import NO_HINTS, NUM_SUMS, ModelHints, Reducer, StepSums, Strategy
from instep.world.determinism import first_matmul
from instep.world.world import World


class _Row:
    """The gradients of all parameters, one flat tensor for each dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, p in enumerate(parameters):
            by_dtype.setdefault(p.dtype, []).append(number)
        self.flats: list[torch.Tensor] = []
        views: dict[int, torch.Tensor] = {}
        for dtype, numbers in by_dtype.items():
            sizes = [parameters[number].numel() for number in numbers]
            flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
            self.flats.append(flat)
            for number, piece in zip(numbers, flat.split(sizes), strict=True):
                views[number] = piece.view_as(parameters[number])
        self.views = [views[number] for number in range(len(parameters))]

    def fill(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy gradients in; one that is missing counts as zero, a sparse one is spread out."""
        dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
        if len(dense) == len(grads):
            torch._foreach_copy_(self.views, dense)
            return
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)


class _Rows:
    """Rows that are used again: memory that is new in every step would cost more than the additions."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._free: list[_Row] = []

    def get(self) -> _Row:
        return self._free.pop() if self._free else _Row(self._parameters)

    def put_back(self, row: _Row) -> None:
        self._free.append(row)

    def add(self, left: _Row, right: _Row) -> _Row:
        for one, other in zip(left.flats, right.flats, strict=True):
            one.add_(other)
        self._free.append(right)
        return left


class ExactReducer(Reducer):
    """Adds the shards' gradients up over their canonical tree ([Note: Exact mode])."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, context: BatchContext) -> None:
        super().__init__(parameters)
        self._world, self._context = world, context
        self._rows = _Rows(self.parameters)
        self._passes: list[TreeSum[_Row]] = []
        self._counted: list[list[list[float | torch.Tensor]]] = []
        """By pass and shard: the step's sums, then which parameters the shard used."""
        self._whole: _Row | None = None
        """What the parameters' gradients are views of."""

    def forget(self) -> None:
        for row in [row for total in self._passes for _, row in total.parts]:
            self._rows.put_back(row)
        if self._whole is not None:
            self._rows.put_back(self._whole)
        self._passes, self._counted, self._whole = [], [], None

    def end_shard(self, sums: StepSums) -> None:
        """Take a shard's gradient, and what it counted."""
        shard = self._context.shard
        if not self._passes or shard < self._passes[-1].parts[-1][0][1]:  # the step goes through its shards again
            self._passes.append(TreeSum(self._context.num_shards, self._rows.add))
            self._counted.append([])
        grads = [p.grad for p in self.parameters]
        self._counted[-1].append([*sums, *(float(grad is not None) for grad in grads)])
        row = self._rows.get()
        row.fill(grads)
        for p in self.parameters:
            p.grad = None
        self._passes[-1].put((shard, shard + 1), row)

    def reduce(self, sums: StepSums) -> StepSums:
        totals = torch.zeros(NUM_SUMS + len(self.parameters), dtype=torch.float64)
        num_passes = len(self._passes)
        if self._has_idle_ranks():  # sums came shard by shard, but a rank without one may have something to say, too
            own = [] if self._passes else [float(value) for value in sums]
            told = self._world.all_gather_object([num_passes, own])
            num_passes = max(passes for passes, _ in told)
            for rank_sums in filter(None, (each for _, each in told)):
                totals[:NUM_SUMS] += torch.tensor(rank_sums, dtype=torch.float64)
        whole: _Row | None = None
        for number in range(num_passes):
            counted = self._counted[number] if number < len(self._counted) else []
            parts = self._passes[number].parts if number < len(self._passes) else []
            totals += _in_order(self._gather(counted))
            root = self._add_up([row for _, row in parts])
            whole = root if whole is None else self._rows.add(whole, root)
        self._passes, self._counted = [], []
        if whole is not None:
            for p, view, count in zip(self.parameters, whole.views, totals[NUM_SUMS:].tolist(), strict=True):
                p.grad = view if count > 0 else None
        self._whole = whole
        return StepSums(*totals[:NUM_SUMS].tolist())

    def _has_idle_ranks(self) -> bool:
        return self._context.num_shards < self._world.world_size

    def _gather(self, counted: list[list[float | torch.Tensor]]) -> torch.Tensor:
        """Bring together what the shards counted, in their order. Called on all ranks."""
        num_shards, size = self._context.num_shards, self._world.world_size
        runs = [run_of(rank, size, num_shards) for rank in range(size)]
        width = NUM_SUMS + len(self.parameters)
        own = torch.zeros(max(last - first for first, last in runs), width, dtype=torch.float64)
        own[: len(counted)] = _as_numbers(counted, width)
        gathered = self._world.all_gather(own.to(self._world.device))
        return torch.cat([part[: last - first] for part, (first, last) in zip(gathered, runs, strict=True)]).cpu()

    def _add_up(self, parts: list[_Row]) -> _Row:
        """Add the ranks' subtrees up to the whole. Called on all ranks."""
        num_shards, size = self._context.num_shards, self._world.world_size
        if size == 1:
            return parts[0]
        nodes = [cover(*run_of(rank, size, num_shards), num_shards) for rank in range(size)]

        def add_up(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            total = TreeSum[torch.Tensor](num_shards, lambda left, right: left.add_(right))
            for node, piece in zip((node for covered in nodes for node in covered), pieces, strict=True):
                total.put(node, piece)
            return total.parts[0][1]

        counts = [len(covered) for covered in nodes]
        if counts == [1, 1]:  # two halves: any way to add two numbers gives the same
            for flat in parts[0].flats:
                self._world.all_reduce(flat)
            return parts[0]
        whole = self._rows.get()
        for number, out in enumerate(whole.flats):
            self._world.ordered_reduce([row.flats[number] for row in parts], counts, add_up, out)
        for row in parts:
            self._rows.put_back(row)
        return whole


def _as_numbers(rows: list[list[float | torch.Tensor]], width: int) -> torch.Tensor:
    """Bring values to the CPU, those of a device together: each transfer by itself would wait for it once more."""
    flat = [value for row in rows for value in row]
    tensors = [value.detach().double() for value in flat if isinstance(value, torch.Tensor)]
    found = iter(torch.stack(tensors).tolist() if tensors else [])
    numbers = [next(found) if isinstance(value, torch.Tensor) else value for value in flat]
    return torch.tensor(numbers, dtype=torch.float64).view(-1, width)


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    """Add rows up from the first to the last."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


class Exact(Strategy):
    """The whole model on every rank, and the same bits at any number of ranks."""

    name = "exact"
    is_exact = True

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        del hints  # the model is taken as it is
        first_matmul(self.grid.world.device)
        model = own_dropout(model, self.context)
        own_batch_norm(model, self.context)
        model = model.to(self.grid.world.device)
        self.grid.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # On CPU, fused kernels round the last few numbers of a tensor differently than the rest: a parameter that is
        # cut would not be updated as the whole one is (seen with SGD).
        if self.grid.world.device.type == "cpu":
            for group in optimizer.param_groups:
                if group.get("fused"):
                    group["fused"] = optimizer.defaults["fused"] = False

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return ExactReducer(parameters, self.grid.data, self.context)
