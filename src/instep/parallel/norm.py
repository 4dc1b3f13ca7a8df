"""BatchNorm over the rows of a micro-batch on all ranks, or in exact mode over those of one shard.

It works on gloo, too, which torch's SyncBatchNorm refuses. Each rank sends its mean, its sum of squared deviations and
its count, and all combine them in rank order (Chan's formula: stable where sums of squares are not). Backward
all-reduces two sums for each channel.

[Note: Shard statistics]
A shard's output may depend on the shard alone, so a BatchNorm normalises by the shard's own mean and variance (ghost
batch normalisation). The running statistics, which evaluation uses, are those of the whole step: at its end the ranks
gather the statistics of their shards, and each rank combines them in the order of the shards (Chan's formula, in
float64) and makes one update. Until then no buffer changes, so no shard depends on another one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.errors import TaskError
from instep.core.tree import run_of
from instep.parallel.batch_context import BatchContext
from instep.parallel.class_change import add_base
from instep.world.world import World

Statistics = tuple[float, torch.Tensor, torch.Tensor]
"""Count, mean and variance (unbiased) by channel."""


class SyncedBatchNorm(torch.autograd.Function):
    """Normalise by the statistics of all ranks' rows, differentiably."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        world: World | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, and the statistics: mean, variance, count."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        dims = [0, *range(2, x.dim())]
        num_channels = x.shape[1]
        count = wide.new_full((1,), x.numel() // num_channels)
        local_mean = wide.mean(dims)
        deviations = (wide - _by_channel(local_mean, x)).square().sum(dims)
        parts = [torch.cat([local_mean, deviations, count])]
        if world is not None:
            parts = world.all_gather(parts[0])
        stacked = torch.stack(parts)
        means, squares, counts = stacked.split([num_channels, num_channels, 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = (variance + eps).rsqrt()
        normal = (wide - _by_channel(mean, x)) * _by_channel(inverse, x)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.world, ctx.dims = world, dims
        ctx.mark_non_differentiable(mean, variance, total)
        y = normal if weight is None else normal * _by_channel(weight, x)
        y = y if bias is None else y + _by_channel(bias, x)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, including those through the statistics of all ranks."""
        normal, weight, inverse, total = ctx.saved_tensors
        grad_wide = grad.to(normal.dtype)
        grad_bias = grad_wide.sum(ctx.dims)
        grad_weight = (grad_wide * normal).sum(ctx.dims)
        sums = torch.cat([grad_bias, grad_weight])
        if ctx.world is not None:
            sums = ctx.world.all_reduce(sums.clone())
        mean_bias, mean_weight = (sums / total).chunk(2)
        scale = inverse if weight is None else inverse * weight
        grad_x = (grad_wide - _by_channel(mean_bias, normal) - normal * _by_channel(mean_weight, normal)) * (
            _by_channel(scale, normal)
        )
        has_weight = weight is not None
        return grad_x.to(grad.dtype), *((grad_weight, grad_bias) if has_weight else (None, None)), None, None


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *([1] * (like.dim() - 2)))


class _Synced(_BatchNorm):
    """Comes between a BatchNorm class and torch's own forward pass, so that a subclass's forward still runs."""

    _context: BatchContext
    _world: World

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not computes_statistics(self, x, self._context) or self._world.world_size == 1:
            return super().forward(x)
        return self._synced(x)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator] # dynamo would trace the collectives, piece by piece
    def _synced(self, x: torch.Tensor) -> torch.Tensor:
        world = None if self._context.replicated else self._world
        y, mean, variance, count = SyncedBatchNorm.apply(x, self.weight, self.bias, self.eps, world)
        if self.track_running_stats:
            update_running(self, mean, variance * (count / (count - 1)))
        return y  # type: ignore[no-any-return]


def update_running(module: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update a BatchNorm's running statistics once, with a mean and an unbiased variance."""
    module.num_batches_tracked += 1
    factor = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    for running, new in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - factor).add_(new.to(running.device, running.dtype), alpha=factor)


def computes_statistics(module: _BatchNorm, x: torch.Tensor, context: BatchContext) -> bool:
    """Return whether a BatchNorm computes statistics of a step's part, rather than leaving the call to torch.

    Raise, before the first update, if the smallest batch of an epoch would have one value for each channel.
    """
    if not module.training or not context.num_rows:
        return False
    module._check_input_dim(x)
    if context.smallest_part * (x.numel() // (x.shape[1] * context.num_rows)) != 1:
        return True
    what = "shard of one" if context.num_shards else "part of one, with --accumulate"
    remedy = "--drop-last, fewer --shards" if context.num_shards else "--drop-last"
    raise TaskError(
        f"a BatchNorm gets {tuple(x.shape[1:])} values a sample, and the smallest batch of an epoch (or {what}) is a "
        f"single sample: one value per channel has no variance. Use {remedy}, or another --batch-size."
    )


def sync_batch_norm(model: nn.Module, world: World, context: BatchContext) -> int:
    """Make the BatchNorms of a model compute over all ranks, in place; return their number.

    In the method resolution order, the synchronised forward pass comes right before torch's own.
    """
    norms = _batch_norms(model)
    for module in norms:
        if world.world_size > 1:
            refuse_own_statistics(type(module))
        add_base(module, _Synced, before=False, _context=context, _world=world)
    return len(norms)


class BatchNormNd(_BatchNorm):
    """What a user's nn.SyncBatchNorm becomes: a BatchNorm for any number of dimensions, on any device."""

    _check_input_dim = nn.SyncBatchNorm._check_input_dim


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorms of a model; those that would synchronise by themselves no longer do."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in norms:
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = BatchNormNd  # type: ignore[assignment]
    return norms


def refuse_own_statistics(kind: type) -> None:
    """Raise if a subclass never calls its base class: its statistics would be those of one rank."""
    if kind.forward is not _BatchNorm.forward and "super" not in kind.forward.__code__.co_names:  # type: ignore[attr-defined]
        raise TaskError(
            f"{kind.__name__} computes its own batch statistics, so they would cover one process's rows only. "
            "Let its forward call super().forward(x), or train on one process."
        )


class ByShard(_BatchNorm):
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


def use_shard_statistics(model: nn.Module, context: BatchContext) -> None:
    """Make the BatchNorms of a model normalise by one shard's statistics, in place."""
    for module in _batch_norms(model):
        refuse_own_statistics(type(module))
        add_base(module, ByShard, before=False, _context=context, _by_shard={})


def update_running_statistics(model: nn.Module, world: World, context: BatchContext, apply: bool) -> None:
    """Make the step's update of all running statistics, or drop it. Called on all ranks."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, ByShard) and m.track_running_stats]
    if not norms:
        return
    if apply:
        widths = [2 * m.num_features + 1 for m in norms]
        first, last = run_of(world.rank, world.world_size, context.num_shards)
        local = torch.zeros(last - first, sum(widths), dtype=torch.float64)
        for row, shard in zip(local, range(first, last), strict=True):
            row.copy_(torch.cat([_flat(_pooled(m._by_shard.get(shard, []), m.num_features)) for m in norms]))
        by_shard = gather_by_shard(local, world, context.num_shards)
        for module, columns in zip(norms, by_shard.split(widths, dim=1), strict=True):
            count, *pooled = _pooled([(float(row[0]), *row[1:].chunk(2)) for row in columns], module.num_features)
            if count:
                update_running(module, *pooled)
    for module in norms:
        module._by_shard.clear()


def gather_by_shard(local: torch.Tensor, world: World, num_shards: int) -> torch.Tensor:
    """Return the rows of all shards, in their order, on the CPU; `local` has this rank's. Called on all ranks."""
    runs = [run_of(rank, world.world_size, num_shards) for rank in range(world.world_size)]
    padded = torch.zeros(max(last - first for first, last in runs), local.shape[1], dtype=torch.float64)
    padded[: len(local)] = local
    gathered = world.all_gather(padded.to(world.device))
    return torch.cat([rows[: last - first] for rows, (first, last) in zip(gathered, runs, strict=True)]).cpu()


def _pooled(statistics: list[Statistics], num_features: int) -> Statistics:
    """Combine the statistics of several sets of values, in their order, in float64."""
    statistics = [(count, mean, variance) for count, mean, variance in statistics if count]
    if not statistics:
        return 0.0, *torch.zeros(2, num_features, dtype=torch.float64)
    total = sum(count for count, _, _ in statistics)
    mean = sum(mean.double() * count for count, mean, _ in statistics) / total
    squares = sum(v.double() * (count - 1) + (m.double() - mean).square() * count for count, m, v in statistics)
    assert isinstance(mean, torch.Tensor)
    assert isinstance(squares, torch.Tensor)
    return total, mean, squares / max(total - 1, 1)


def _flat(statistics: Statistics) -> torch.Tensor:
    count, mean, variance = statistics
    return torch.cat([torch.tensor([count], dtype=torch.float64), mean.cpu(), variance.cpu()])
