"""BatchNorm in exact mode: batch statistics of one shard, running statistics of all shards of a step.

[Note: Shard statistics]
A shard's output may depend on the shard alone, so a BatchNorm normalises by the shard's own mean and variance (ghost
batch normalisation). The running statistics, which evaluation uses, are those of the whole step: at its end the ranks
gather the statistics of their shards, and each rank combines them in the order of the shards (Chan's formula, in
float64) and makes one update. Until then no buffer changes, so no shard depends on another one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.tree import run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.class_change import add_base
from instep.parallel.norm import computes_statistics, refuse_own_statistics, update_running
from instep.world.world import World

Statistics = tuple[float, torch.Tensor, torch.Tensor]
"""Count, mean and variance (unbiased) by channel."""


class _ByShard(_BatchNorm):
    """Comes between a BatchNorm class and torch's own forward pass, so that a subclass's forward still runs."""

    _context: BatchContext
    _by_shard: dict[int, list[Statistics]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self._context
        if not computes_statistics(self, x, context) or not self.track_running_stats:
            return super().forward(x)
        dtype = x.dtype if self.running_mean is None else self.running_mean.dtype
        mean, variance = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
        # With a momentum of 1 the kernel writes the batch's own statistics into the running ones that it is given.
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        if not context.again:
            self._by_shard.setdefault(context.shard, []).append((x.numel() / x.shape[1], mean, variance))
        return y


def is_by_shard(module: nn.Module) -> bool:
    """Return whether `update_running_statistics` updates a module's running statistics."""
    return isinstance(module, _ByShard)


def use_shard_statistics(model: nn.Module, context: BatchContext) -> None:
    """Make the BatchNorms of a model normalise by one shard's statistics, in place."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            refuse_own_statistics(type(module))
            add_base(module, _ByShard, "Shard", before=False, _context=context, _by_shard={})


def update_running_statistics(model: nn.Module, world: World, context: BatchContext, apply: bool) -> None:
    """Make the step's update of all running statistics, or drop it. Called on all ranks."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _ByShard) and m.track_running_stats]
    if not norms:
        return
    if apply:
        widths = [2 * m.num_features + 1 for m in norms]
        first, last = run_of(world.rank, world.world_size, context.num_shards)
        local = torch.zeros(last - first, sum(widths), dtype=torch.float64)
        for row, shard in zip(local, range(first, last), strict=True):
            row.copy_(torch.cat([_flat(_pooled(m._by_shard.get(shard, [])), m) for m in norms]))
        by_shard = gather_by_shard(local, world, context.num_shards)
        for module, columns in zip(norms, by_shard.split(widths, dim=1), strict=True):
            if (pooled := _pooled([(float(row[0]), *row[1:].chunk(2)) for row in columns])) is not None:
                update_running(module, *pooled[1:])
    for module in norms:
        module._by_shard.clear()


def gather_by_shard(local: torch.Tensor, world: World, num_shards: int) -> torch.Tensor:
    """Return the rows of all shards, in their order, on the CPU; `local` has this rank's. Called on all ranks."""
    runs = [run_of(rank, world.world_size, num_shards) for rank in range(world.world_size)]
    padded = torch.zeros(max(last - first for first, last in runs), local.shape[1], dtype=torch.float64)
    padded[: len(local)] = local
    gathered = world.all_gather(padded.to(world.device))
    return torch.cat([rows[: last - first] for rows, (first, last) in zip(gathered, runs, strict=True)]).cpu()


def _pooled(statistics: list[Statistics]) -> Statistics | None:
    """Combine the statistics of several sets of values, in their order, in float64."""
    statistics = [(count, mean, variance) for count, mean, variance in statistics if count]
    if not statistics:
        return None
    total = sum(count for count, _, _ in statistics)
    mean = sum(mean.double() * count for count, mean, _ in statistics) / total
    squares = sum(v.double() * (count - 1) + (m.double() - mean).square() * count for count, m, v in statistics)
    assert isinstance(mean, torch.Tensor)
    assert isinstance(squares, torch.Tensor)
    return total, mean, squares / max(total - 1, 1)


def _flat(statistics: Statistics | None, module: Any) -> torch.Tensor:
    if statistics is None:
        return torch.zeros(2 * module.num_features + 1, dtype=torch.float64)
    count, mean, variance = statistics
    return torch.cat([torch.tensor([count], dtype=torch.float64), mean.cpu(), variance.cpu()])
