"""Dropout whose mask for a row does not depend on which rank holds the row.

[Note: Row noise]
The mask of element e of row r is a hash of (seed, step, layer, use of the layer in this pass, r, e), where r
counts in the global batch. Each rank draws just its own rows, and any split gives the same masks (C5). The
hash is a handful of 32-bit multiplications and shifts on whole tensors: on CPU cheaper than torch's
generator, on GPUs one fused kernel when compiled. One hash serves two elements of 16 bits each; the keep
probability is rounded to 1/65536, and the scale uses the rounded one, so that the expectation is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from instep.parallel.batch_context import BatchContext, mix64, signed32

_LEVELS = 1 << 16


_ODD_1, _ODD_2, _ODD_3 = 0x7FEB352D, signed32(0x846CA68B), signed32(0x9E3779B1)


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 well; for the few keys of rows and columns. torch shifts in the sign, hence the masks."""
    for shift, factor in ((16, _ODD_1), (15, _ODD_2)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def _halves(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash each pair of a row key and a column key into two 16-bit halves, in as few passes as mix well."""
    words = rows[:, None] + columns[None, :]
    words ^= words >> 15
    words *= _ODD_1
    high = words >> 16
    words *= _ODD_2
    words ^= high
    words *= _ODD_1
    return words.view(torch.int16)


Part = tuple[int, int, int]
"""A run of columns of a larger tensor: the dimension they are in, the first one, how many."""


def _has_whole_pairs(shape: Sequence[int], part: Part, row_dim: int) -> bool:
    """Tell whether no two elements that share a hash lie in different parts."""
    dim, first, count = part
    inner = math.prod(shape[dim + 1 :])
    return dim > row_dim and not any(size * inner % 2 for size in (first, count, shape[dim]))


def _elements(
    shape: Sequence[int], row_dim: int, part: Part | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Number the rows, and the pairs of a row's elements that are wanted; give the shape that these make up."""
    others = math.prod(shape) // max(shape[row_dim], 1)
    rows = torch.arange(shape[row_dim], device=device, dtype=torch.int32)
    pairs = torch.arange((others + 1) // 2, device=device, dtype=torch.int32)
    if part is None:
        return rows, pairs, list(shape)
    dim, first, count = part
    inner = math.prod(shape[dim + 1 :])
    own = pairs.view(-1, shape[dim] * inner // 2)[:, first * inner // 2 : (first + count) * inner // 2]
    return rows, own.reshape(-1), [*shape[:dim], count, *shape[dim + 1 :]]


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
        # Of a tensor that ranks share, which looks whole, its own columns are enough.
        part: Part | None = None if self.channels else getattr(x, "part", None)
        keep = self._keep(torch.Size(shape), x.device, levels, part)
        is_part = keep.shape != shape
        if self.channels:
            keep = keep.reshape(*shape, *([1] * (x.dim() - 2)))
        mask = keep.to(x.dtype).mul_(_LEVELS / levels)
        return x * (x.like(mask) if is_part else mask)  # type: ignore[attr-defined]

    def _keep(self, shape: torch.Size, device: torch.device, levels: int, part: Part | None = None) -> torch.Tensor:
        """Draw which elements stay, as bools; where it can be, only those of a part."""
        salt = self._next_salt()
        row_dim, rows_each = self._find_rows(shape)
        part = part if part is not None and _has_whole_pairs(shape, part, row_dim) else None
        row_keys, pairs, wanted = _elements(shape, row_dim, part, device)
        halves = _halves(
            _scramble(
                (row_keys + self._context.noise[2] * rows_each) * _ODD_3 + (self._context.noise[0] ^ signed32(salt))
            ),
            _scramble(pairs * _ODD_3 + (self._context.noise[1] ^ signed32(salt >> 32))),
        )
        others = math.prod(wanted) // max(wanted[row_dim], 1)
        keep = halves[:, :others] < levels - _LEVELS // 2
        if row_dim == 0:
            return keep.reshape(wanted)
        moved = (wanted[row_dim], *wanted[:row_dim], *wanted[row_dim + 1 :])
        return keep.reshape(moved).movedim(0, row_dim)

    def _find_rows(self, shape: torch.Size) -> tuple[int, int]:
        """Tell which dimension holds the batch's rows, and how many of its entries belong to one row.

        It is the first, or the second where time comes first. Else the first one may hold rows flattened
        with something (tokens), which its size cannot prove; so that guess is said. What is neither
        (position embeddings) gets one mask, the same on all ranks: its rows are nobody's.
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
                f"dropout {self._name!r} sees {tuple(shape)} for {num_rows} rows, and takes it for {each} a row. "
                "If its first dimension is not the batch's, its noise differs with the number of processes."
            )
        return 0, each

    def _next_salt(self) -> int:
        """Tell this use of the layer from its earlier ones in the same pass."""
        self.uses += 1
        return self._salt if self.uses == 1 else mix64(self._salt + self.uses)


_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def own_dropout(model: nn.Module, context: BatchContext) -> nn.Module:
    """Replace the dropout modules of a model by ones whose masks do not depend on the split."""
    found = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Dropout, *_BY_CHANNEL)]
    made: dict[int, RowDropout] = {}
    for layer, (name, module) in enumerate(found):
        assert isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
        own = RowDropout(module.p, context, layer, name, channels=isinstance(module, _BY_CHANNEL))
        made[id(module)] = own.train(module.training)
    if id(model) in made:
        return made[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # not named_children: it leaves out a second name
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return model
