"""Exact mode: gradients whose bits do not depend on the number of ranks.

[Note: Exact mode]
The global batch is cut into shards that depend on the spec alone. A rank computes consecutive shards, each with its own
forward and backward pass. A shard's gradient depends only on the shard: its samples, its noise, the number of threads,
deterministic kernels. The gradients are added over the canonical tree of the shards ([Note: Canonical tree]): a rank
adds its own as they come, the ranks exchange the remaining subtrees, and all add those. The step's other sums (loss,
weights) are kept by shard and added in the order of the shards. A world of one rank does the same.
"""

from collections.abc import Sequence

import torch
from torch import nn

from instep.core.tree import TreeSum, cover, run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import replace_dropout
from instep.parallel.gradients import by_dtype, copy_gradients
from instep.parallel.norm import gather_by_shard, use_shard_statistics
from instep.parallel.strategy import NUM_SUMS, ModelHints, Reducer, StepSums, Strategy
from instep.world.determinism import prepare_deterministic
from instep.world.world import World


class _FlatGradients:
    """The gradients of all parameters, one flat buffer for each dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.flats: list[torch.Tensor] = []
        pieces: dict[nn.Parameter, torch.Tensor] = {}
        for dtype, group in by_dtype(parameters).items():
            sizes = [p.numel() for p in group]
            self.flats.append(torch.empty(sum(sizes), dtype=dtype, device=group[0].device))
            pieces |= zip(group, self.flats[-1].split(sizes), strict=True)
        self.views = [pieces[p].view_as(p) for p in parameters]


class ExactReducer(Reducer):
    """Adds the shards' gradients over their canonical tree ([Note: Exact mode])."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, context: BatchContext) -> None:
        super().__init__(parameters)
        self._world, self._context = world, context
        self._free: list[_FlatGradients] = []
        """For reuse: allocating them in every step would cost more than the additions."""
        self._passes: list[TreeSum[_FlatGradients]] = []
        self._counted: list[list[list[float | torch.Tensor]]] = []
        """By pass and shard: the step's sums, then which parameters the shard used."""
        self._total: _FlatGradients | None = None
        """What the parameters' gradients are views of."""

    def forget(self) -> None:
        self._free += [gradients for subtotal in self._passes for _, gradients in subtotal.parts]
        if self._total is not None:
            self._free.append(self._total)
        self._passes, self._counted, self._total = [], [], None

    def _allocate(self) -> _FlatGradients:
        return self._free.pop() if self._free else _FlatGradients(self.parameters)

    def _add(self, left: _FlatGradients, right: _FlatGradients) -> _FlatGradients:
        for one, other in zip(left.flats, right.flats, strict=True):
            one.add_(other)
        self._free.append(right)
        return left

    def end_shard(self, sums: StepSums) -> None:
        """Take a shard's gradient and its sums."""
        shard = self._context.shard
        if not self._passes or shard < self._passes[-1].parts[-1][0][1]:  # the step repeats its shards
            self._passes.append(TreeSum(self._context.num_shards, self._add))
            self._counted.append([])
        grads = [p.grad for p in self.parameters]
        self._counted[-1].append([*sums, *(float(grad is not None) for grad in grads)])
        gradients = self._allocate()
        copy_gradients(gradients.views, grads)
        for p in self.parameters:
            p.grad = None
        self._passes[-1].put((shard, shard + 1), gradients)

    def reduce(self, sums: StepSums) -> StepSums:
        totals = torch.zeros(NUM_SUMS + len(self.parameters), dtype=torch.float64)
        num_passes = len(self._passes)
        if self._context.num_shards < self._world.world_size:  # a rank without a shard may have sums, too
            local_sums = [] if self._passes else [float(value) for value in sums]
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
            root = self._add_subtrees([gradients for _, gradients in parts])
            total = root if total is None else self._add(total, root)
        self._passes, self._counted = [], []
        if total is not None:
            for p, view, count in zip(self.parameters, total.views, totals[NUM_SUMS:].tolist(), strict=True):
                p.grad = view if count > 0 else None
        self._total = total
        return StepSums(*totals[:NUM_SUMS].tolist())

    def _add_subtrees(self, parts: list[_FlatGradients]) -> _FlatGradients:
        """Return the sum of all ranks' subtrees. Called on all ranks."""
        num_shards, size = self._context.num_shards, self._world.world_size
        if size == 1:
            return parts[0]
        nodes = [cover(*run_of(rank, size, num_shards), num_shards) for rank in range(size)]

        def add_tree(subtrees: Sequence[torch.Tensor]) -> torch.Tensor:
            total = TreeSum[torch.Tensor](num_shards, lambda left, right: left.add_(right))
            for node, subtree in zip((node for covered in nodes for node in covered), subtrees, strict=True):
                total.put(node, subtree)
            return total.parts[0][1]

        counts = [len(covered) for covered in nodes]
        if counts == [1, 1]:  # two halves: the order of two terms does not matter
            for flat in parts[0].flats:
                self._world.all_reduce(flat)
            return parts[0]
        total = self._allocate()
        for number, out in enumerate(total.flats):
            self._world.ordered_reduce([gradients.flats[number] for gradients in parts], counts, add_tree, out)
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
        return ExactReducer(parameters, self.grid.data, self.context)
