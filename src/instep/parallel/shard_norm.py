"""BatchNorm in exact mode: the statistics of one shard, and running ones that all shards of a step make together.

[Note: Shard statistics]
A shard's output may depend on the shard alone, so a BatchNorm normalises by the shard's own mean and variance (ghost
batch normalisation). The running statistics, which evaluation uses, are those of the whole step: at its end the
ranks tell each other what their shards saw, and everyone combines that in the order of the shards (Chan's formula, in
float64) and makes one update. Until then no buffer changes, so that no shard sees what another one left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.tree import run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.norm import refuse_own_way, refuse_single_values
from instep.world.world import World

Statistics = tuple[float, torch.Tensor, torch.Tensor]
"""Count, mean and variance (unbiased) by channel."""


class _ByShard(_BatchNorm):
    """Stands between a BatchNorm class and torch's own forward pass, so that a subclass's own one goes on working."""

    _context: BatchContext
    _seen: dict[int, list[Statistics]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self._context
        if not self.training or not context.num_rows:
            return super().forward(x)
        self._check_input_dim(x)
        refuse_single_values(x, context)
        if not self.track_running_stats:
            return super().forward(x)
        mean, variance = (torch.zeros(x.shape[1], dtype=self._statistics_dtype(x), device=x.device) for _ in range(2))
        # With a momentum of 1 the kernel leaves the batch's own statistics in what it takes for running ones.
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        if not context.again:
            self._seen.setdefault(context.shard, []).append((x.numel() / x.shape[1], mean, variance))
        return y

    def _statistics_dtype(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype if self.running_mean is None else self.running_mean.dtype


_classes: dict[type, type] = {}


def is_by_shard(module: nn.Module) -> bool:
    """Tell whether a module's running statistics are looked after here."""
    return isinstance(module, _ByShard)


def own_batch_norm(model: nn.Module, context: BatchContext) -> None:
    """Make the BatchNorms of a model keep to one shard; the modules stay what they are."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kind = type(module)
            refuse_own_way(kind)
            if kind not in _classes:
                _classes[kind] = type(f"Shard{kind.__name__}", (kind, _ByShard), {})
            module.__class__ = _classes[kind]
            own: Any = module
            own._context, own._seen = context, {}


def settle_running_statistics(model: nn.Module, world: World, context: BatchContext, apply: bool) -> None:
    """Make the step's update of all running statistics, or drop it. Called on all ranks."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _ByShard) and m.track_running_stats]
    if not norms:
        return
    if apply:
        runs = [run_of(rank, world.world_size, context.num_shards) for rank in range(world.world_size)]
        first, last = runs[world.rank]
        own = [torch.cat([_flat(_pooled(m._seen.get(s, [])), m) for m in norms]) for s in range(first, last)]
        width = sum(2 * m.num_features + 1 for m in norms)
        padded = torch.zeros(max(b - a for a, b in runs), width, dtype=torch.float64)
        for row, values in zip(padded, own, strict=False):
            row.copy_(values)
        gathered = world.all_gather(padded.to(world.device))
        rows = torch.cat([part[: b - a] for part, (a, b) in zip(gathered, runs, strict=True)]).cpu()
        for module, columns in zip(norms, rows.split([2 * m.num_features + 1 for m in norms], dim=1), strict=True):
            _update(module, [_from_row(row) for row in columns])
    for module in norms:
        module._seen.clear()


def _pooled(seen: list[Statistics]) -> Statistics | None:
    """Combine statistics of several sets of values, in their order, in float64."""
    seen = [each for each in seen if each[0]]
    if not seen:
        return None
    total = sum(count for count, _, _ in seen)
    mean = sum(mean.double() * count for count, mean, _ in seen) / total
    squares = sum(v.double() * (count - 1) + (m.double() - mean).square() * count for count, m, v in seen)
    assert isinstance(mean, torch.Tensor)
    assert isinstance(squares, torch.Tensor)
    return total, mean, squares / max(total - 1, 1)


def _flat(seen: Statistics | None, module: Any) -> torch.Tensor:
    if seen is None:
        return torch.zeros(2 * module.num_features + 1, dtype=torch.float64)
    count, mean, variance = seen
    return torch.cat([torch.tensor([count], dtype=torch.float64), mean.cpu(), variance.cpu()])


def _from_row(row: torch.Tensor) -> Statistics:
    mean, variance = row[1:].chunk(2)
    return float(row[0]), mean, variance


def _update(module: Any, seen: list[Statistics]) -> None:
    pooled = _pooled(seen)
    if pooled is None:
        return
    _, mean, variance = pooled
    module.num_batches_tracked += 1
    factor = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    for running, new in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - factor).add_(new.to(running.device, running.dtype), alpha=factor)
