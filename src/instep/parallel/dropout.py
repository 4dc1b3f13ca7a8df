"""Dropout whose mask for a row does not depend on the rank that computes the row.

[Note: Row noise]
The mask of element e of row r is a hash of (seed, step, layer, use of the layer in this pass, r, e), where r is the
position in the global batch. Each rank draws its own rows only, and any split gives the same masks (C5). The hash is a
handful of 32-bit multiplications and shifts on whole tensors: on CPU cheaper than torch's generator, on GPUs one fused
kernel when compiled. One hash serves two elements of 16 bits each. The keep probability is rounded to 1/65536, and the
scale uses the rounded probability, so that the expectation is exact.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from instep.core.splitmix import mix64
from instep.parallel.batch_context import BatchContext, signed32

_LEVELS = 1 << 16
_ODD_1, _ODD_2, _ODD_3 = 0x7FEB352D, signed32(0x846CA68B), signed32(0x9E3779B1)


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 thoroughly, for the keys of rows and columns. torch shifts the sign in, hence the masks."""
    for shift, factor in ((16, _ODD_1), (15, _ODD_2)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def _halves(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash each pair of a row key and a column key into two 16-bit halves, in few passes over memory."""
    words = rows[:, None] + columns[None, :]
    words ^= words >> 15
    words *= _ODD_1
    high = words >> 16
    words *= _ODD_2
    words ^= high
    words *= _ODD_1
    return words.view(torch.int16)


ShardRange = tuple[int, int, int]
"""Consecutive columns of a larger tensor: their dimension, the first one, how many."""


def _elements(
    shape: Sequence[int], row_dim: int, shard: ShardRange | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the numbers of the rows, those of the pairs of elements in a row of the shard, and the shard's shape.

    Return all pairs where the two elements of one, which share a hash, may be in different shards.
    """
    others = math.prod(shape) // max(shape[row_dim], 1)
    rows = torch.arange(shape[row_dim], device=device, dtype=torch.int32)
    pairs = torch.arange((others + 1) // 2, device=device, dtype=torch.int32)
    dim, first, count = shard or (row_dim, 0, 0)
    inner = math.prod(shape[dim + 1 :])
    if dim <= row_dim or any(size * inner % 2 for size in (first, count, shape[dim])):
        return rows, pairs, list(shape)
    local = pairs.view(-1, shape[dim] * inner // 2)[:, first * inner // 2 : (first + count) * inner // 2]
    return rows, local.reshape(-1), [*shape[:dim], count, *shape[dim + 1 :]]


class RowDropout(nn.Dropout):
    """nn.Dropout with masks by row; `channels` makes it nn.Dropout1d, 2d or 3d."""

    def __init__(self, p: float, context: BatchContext, layer: int, name: str = "", channels: bool = False) -> None:
        super().__init__(p)
        self.channels = channels
        self.uses = 0
        self._context = context
        self._name = name
        self._salt = mix64(layer + 1)
        context.noisy.append(self)

    def extra_repr(self) -> str:
        return f"p={self.p}, by row"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] if self.channels else x.shape
        levels = min(_LEVELS - 1, max(1, round((1 - self.p) * _LEVELS)))
        # A Slice has the shape of the whole tensor; the mask of this rank's columns is enough.
        shard: ShardRange | None = None if self.channels else getattr(x, "local_range", None)
        keep = self._keep(torch.Size(shape), x.device, levels, shard)
        is_local = keep.shape != shape
        if self.channels:
            keep = keep.reshape(*shape, *([1] * (x.dim() - 2)))
        mask = keep.to(x.dtype).mul_(_LEVELS / levels)
        return x * (x.with_local(mask) if is_local else mask)  # type: ignore[attr-defined]

    def _keep(self, shape: torch.Size, device: torch.device, levels: int, shard: ShardRange | None) -> torch.Tensor:
        """Return which elements stay, as bools; those of the shard only, where no pair is cut."""
        self.uses += 1
        salt = self._salt if self.uses == 1 else mix64(self._salt + self.uses)  # each use draws noise of its own
        row_dim, rows_each = self._find_rows(shape)
        rows, pairs, wanted = _elements(shape, row_dim, shard, device)
        noise, others = self._context.noise, math.prod(wanted) // max(wanted[row_dim], 1)
        rows = _scramble((rows + noise[2] * rows_each) * _ODD_3 + (noise[0] ^ signed32(salt)))
        pairs = _scramble(pairs * _ODD_3 + (noise[1] ^ signed32(salt >> 32)))
        keep = _halves(rows, pairs)[:, :others] < levels - _LEVELS // 2
        if row_dim == 0:
            return keep.reshape(wanted)
        moved = (wanted[row_dim], *wanted[:row_dim], *wanted[row_dim + 1 :])
        return keep.reshape(moved).movedim(0, row_dim)

    def _find_rows(self, shape: torch.Size) -> tuple[int, int]:
        """Return the dimension of the batch's rows, and how many of its entries belong to one row.

        It is the first dimension, or the second where time comes first. Otherwise the first one may hold rows flattened
        with something else (tokens). Its size cannot prove that, so the guess is reported. A tensor without rows
        (position embeddings) gets one mask, the same on all ranks.
        """
        num_rows = self._context.num_rows
        if not num_rows:
            return 0, 0
        if shape[0] == num_rows:
            return 0, 1
        if len(shape) > 2 and shape[1] == num_rows:
            return 1, 1
        each, rest = divmod(shape[0], num_rows)
        if rest:
            return 0, 0
        if not torch.compiler.is_compiling():
            self._context.doubts[self._name] = (
                f"dropout {self._name!r} gets {tuple(shape)} for {num_rows} rows, and assumes {each} entries for each "
                "row. If its first dimension is not the batch's, its noise differs with the number of processes."
            )
        return 0, each


_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def replace_dropout(model: nn.Module, context: BatchContext) -> nn.Module:
    """Replace the dropout modules of a model by RowDropout; return the model."""
    modules = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Dropout, *_BY_CHANNEL)]
    replacements: dict[int, RowDropout] = {}
    for layer, (name, module) in enumerate(modules):
        assert isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
        dropout = RowDropout(module.p, context, layer, name, channels=isinstance(module, _BY_CHANNEL))
        replacements[id(module)] = dropout.train(module.training)
    if id(model) in replacements:
        return replacements[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children omits a module's second name
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
    return model
