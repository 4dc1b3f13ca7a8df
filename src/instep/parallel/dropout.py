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

LEVELS = 1 << 16
_ODD_1, _ODD_2, ODD = 0x7FEB352D, signed32(0x846CA68B), signed32(0x9E3779B1)


def scramble(x: torch.Tensor) -> torch.Tensor:
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


Key = tuple[int, int] | torch.Tensor
"""The two 32-bit halves of what tells a draw from others; a tensor of two for compiled code."""
_KEPT_USES = 4


def key_of(salt: int) -> tuple[int, int]:
    """Return the halves of 64 bits as signed numbers."""
    return signed32(salt), signed32(salt >> 32)


def key_table(salts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return keys as rows of a tensor, for compiled code that serves several layers ([Note: Regional compilation])."""
    return torch.tensor([key_of(salt) for salt in salts], dtype=torch.int32).to(device)


ShardRange = tuple[int, int, int]
"""Consecutive columns of a larger tensor: their dimension, the first one, how many."""


_Columns = tuple[torch.Tensor, int, list[int]]
"""Hashes of pairs by line, how many elements are in a line of them, a shape."""
_BY_LINE = 4


def _columns(shape: Sequence[int], row_dim: int, shard: ShardRange | None, key: torch.Tensor) -> _Columns:
    """Return the hashes of the pairs of elements in a row of the shard, line by line, and the shard's shape.

    Return all pairs where the two elements of one, which share a hash, may be in different shards.
    """
    others = math.prod(shape) // max(shape[row_dim], 1)
    dim, first, count = shard or (row_dim, 0, 0)
    inner = math.prod(shape[dim + 1 :])
    is_cut = dim > row_dim and not any(size * inner % 2 for size in (first, count, shape[dim]))
    wanted = [*shape[:dim], count, *shape[dim + 1 :]] if is_cut else list(shape)
    if row_dim == 0 and len(shape) == _BY_LINE:
        pairs = _pairs_by_line(shape, key)
        if is_cut:
            half = 2 if dim == 3 else 1
            pairs = pairs.narrow(dim - 1, first // half, count // half)
        return pairs.flatten(0, 1), wanted[3], wanted
    numbers = torch.arange((others + 1) // 2, device=key.device, dtype=torch.int32)
    if is_cut:
        numbers = numbers.view(-1, shape[dim] * inner // 2)[:, first * inner // 2 : (first + count) * inner // 2]
    return scramble(numbers.reshape(1, -1) * ODD + key), math.prod(wanted) // max(wanted[row_dim], 1), wanted


def _pairs_by_line(shape: Sequence[int], key: torch.Tensor) -> torch.Tensor:
    """Return the hashes of the pairs of elements of a row with three dimensions, each line from its place alone.

    Attention's weights are such: heads, queries, keys. Batches that are padded to their longest sample have as many
    queries and keys as that is long, so a pair's number in the row would depend on the other rows of the part.
    """
    lines = torch.arange(shape[1], device=key.device, dtype=torch.int32)[:, None] * (1 << 16)
    lines = lines + torch.arange(shape[2], device=key.device, dtype=torch.int32)
    pairs = torch.arange((shape[3] + 1) // 2, device=key.device, dtype=torch.int32)
    return scramble(scramble(lines * ODD + key)[:, :, None] + pairs * ODD)


def keep_mask(
    context: BatchContext, key: Key, shape: torch.Size, levels: int, shard: ShardRange | None, name: str
) -> torch.Tensor:
    """Return which elements stay, as bools, on the context's device; those of the shard only, where no pair is cut."""
    noise = context.noise
    row_dim, rows_each = find_rows(shape, context, name)
    rows = torch.arange(shape[row_dim], device=noise.device, dtype=torch.int32)
    rows = scramble((rows + noise[2] * rows_each) * ODD + (noise[0] ^ key[0]))
    pairs, line, wanted = _columns(shape, row_dim, shard, noise[1] ^ key[1])
    halves = _halves(rows, pairs.reshape(-1)).view(rows.shape[0], pairs.shape[0], 2 * pairs.shape[1])
    keep = halves[:, :, :line] < levels - LEVELS // 2
    return rows_back(keep, wanted, row_dim)


def rows_back(by_row: torch.Tensor, shape: Sequence[int], row_dim: int) -> torch.Tensor:
    """Return rows and their elements in the shape that was asked for."""
    if row_dim == 0:
        return by_row.reshape(tuple(shape))
    moved = (shape[row_dim], *shape[:row_dim], *shape[row_dim + 1 :])
    return by_row.reshape(moved).movedim(0, row_dim)


def find_rows(shape: Sequence[int], context: BatchContext, name: str) -> tuple[int, int]:
    """Return the dimension of the batch's rows, and how many of its entries belong to one row.

    It is the first dimension, or the second where time comes first. Otherwise the first one of several may hold rows
    flattened with something else (tokens). Its size cannot prove that, so the guess is reported. A tensor without rows
    (position embeddings) gets the same noise on all ranks.
    """
    num_rows = context.num_rows
    if not num_rows or not shape:
        return 0, 0
    if shape[0] == num_rows:
        return 0, 1
    if len(shape) > 2 and shape[1] == num_rows:
        return 1, 1
    each, rest = divmod(shape[0], num_rows)
    if rest or not each or len(shape) == 1:
        return 0, 0
    if not torch.compiler.is_compiling():
        context.doubts[name] = (
            f"{name} gets {tuple(shape)} for {num_rows} rows, and assumes {each} entries for each row. If its first "
            "dimension is not the batch's, its noise differs with the number of processes."
        )
    return 0, each


def levels_of(p: float) -> int:
    """Return which of the 65536 values of a hash keep an element, given the probability to drop it."""
    return min(LEVELS - 1, max(1, round((1 - p) * LEVELS)))


class RowDropout(nn.Dropout):
    """nn.Dropout with masks by row; `channels` makes it nn.Dropout1d, 2d or 3d."""

    def __init__(self, p: float, context: BatchContext, layer: int, name: str = "", channels: bool = False) -> None:
        super().__init__(p)
        self.channels = channels
        self.uses = 0
        self._context = context
        self._name = f"dropout {name!r}"  # made here: in compiled code it would be a guard
        self._salt = mix64(layer + 1)
        self._keys: torch.Tensor | None = None
        context.noisy.append(self)
        context.read_noise()

    def extra_repr(self) -> str:
        return f"p={self.p}, by row"

    def hold_keys(self) -> None:
        """Read keys from a tensor in compiled code, which then serves other layers, too."""
        salts = [self._salt_of(use) for use in range(1, _KEPT_USES + 1)]
        self._keys = key_table(salts, self._context.noise.device)

    def _salt_of(self, use: int) -> int:
        return self._salt if use == 1 else mix64(self._salt + use)  # each use draws noise of its own

    def _key(self, use: int) -> Key:
        if self._keys is not None and use <= _KEPT_USES and torch.compiler.is_compiling():
            return self._keys[use - 1]
        return key_of(self._salt_of(use))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = x.shape[:2] if self.channels else x.shape
        levels = levels_of(self.p)
        # A Slice has the shape of the whole tensor; the mask of this rank's columns is enough.
        shard: ShardRange | None = None if self.channels else getattr(x, "local_range", None)
        key = self._key(self._context.next_use(self))
        keep = keep_mask(self._context, key, torch.Size(shape), levels, shard, self._name)
        is_local = keep.shape != shape
        if self.channels:
            keep = keep.reshape(*shape, *([1] * (x.dim() - 2)))
        mask = keep.to(x.dtype).mul_(LEVELS / levels)
        return x * (x.with_local(mask) if is_local else mask)  # type: ignore[attr-defined]


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
