"""Whether ranks hold the same tensors: a number for each tensor, and which ranks differ in which tensors.

[Note: Fingerprint]
A tensor's fingerprint is the sum, modulo 2^64, of its raw bits in pieces of at most 32, each times a key of its
position. Keys are odd, so any change of one piece changes the sum. Two pieces that swap places go unnoticed only if
their keys agree in their lowest 33 bits. A key is a row's times a column's, so that the table of keys stays in
the cache however long a tensor is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from instep.core.splitmix import finalize64

_ROW = 2**15
"""Pieces that are multiplied at once: as 64-bit numbers, with their keys, they fit a core's cache."""
_ROWS_ON_A_DEVICE = 128
_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's fingerprint, as a tensor of one number on its device ([Note: Fingerprint])."""
    lanes = _lanes(tensor)
    if lanes.numel() <= _ROW:
        return lanes.long().mul_(_keys(1, lanes.numel(), lanes.device)).sum()
    num_rows = -(-lanes.numel() // _ROW)
    whole = lanes[: (num_rows - 1) * _ROW].view(-1, _ROW)
    columns = _keys(1, _ROW, lanes.device)
    at_once = 1 if lanes.device.type == "cpu" else _ROWS_ON_A_DEVICE
    sums = [rows.long().mul_(columns).sum(1) for rows in whole.split(at_once)]
    rest = lanes[whole.numel() :]
    sums.append(rest.long().mul_(columns[: rest.numel()]).sum(0, keepdim=True))
    return torch.cat(sums).mul_(_keys(2, num_rows, lanes.device)).sum()


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprints of tensors on any devices; wait for each device once."""
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    prints = torch.zeros(len(tensors), dtype=torch.int64)
    for numbers in by_device.values():
        prints[numbers] = torch.stack([fingerprint(tensors[number]) for number in numbers]).cpu()
    return prints


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's raw bits as integers, narrow enough that their differences survive the multiplication."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().view(-1)
    return flat.view(_LANES[flat.element_size()])


@cache
def _keys(kind: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first keys of a kind: odd numbers, hashed from their position (splitmix64)."""
    if count & (count - 1):
        return _keys(kind, 1 << count.bit_length(), device)[:count]
    position = numpy.arange(1, count + 1, dtype=numpy.uint64) + numpy.uint64(kind << 40)
    value = finalize64(position * numpy.uint64(0x9E3779B97F4A7C15)) | numpy.uint64(1)
    return torch.from_numpy(value.view(numpy.int64)).to(device)


def updated_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors that updates change, by name: the optimizer's, which may be the cause, before parameters."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    in_optimizer: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            owner = names.get(id(p), "a parameter outside of the model")
            for key, tensor in _tensors_in(state):
                in_optimizer[f"optimizer {key} of {owner}"] = tensor
    return in_optimizer | named


def _tensors_in(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors_in(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _tensors_in(value, f"{name}[{number}]")


def buffers_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the persistent buffers by name: BatchNorm's running statistics, and all others."""
    statistics: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            of_norm = isinstance(module, _BatchNorm) and name in _STATISTICS
            (statistics if of_norm else others)[f"{prefix}.{name}" if prefix else name] = buffer
    return statistics, others


@dataclass(frozen=True)
class Drift:
    """In which tensors ranks differ, and which ranks."""

    names: tuple[str, ...]
    """Of tensors, in the order in which they were given."""
    ranks: tuple[int, ...]
    """Those that differ from more than half of the ranks; all ranks, where no majority agrees."""
    world_size: int

    @property
    def has_majority(self) -> bool:
        """Whether it is known which ranks are wrong."""
        return len(self.ranks) < self.world_size

    def __str__(self) -> str:
        first, *more = self.names
        also = f" (and in {more[0]}{f' and {len(more) - 1} more' if len(more) > 1 else ''})" if more else ""
        listed = ", ".join(map(str, self.ranks))
        if not self.has_majority:
            which = "either" if self.world_size == 2 else "any of them"
            return f"ranks {listed} differ in {first}{also}, and no majority says which is right: {which} may be wrong"
        who = f"rank {listed} differs" if len(self.ranks) == 1 else f"ranks {listed} differ"
        return f"{who} from the other {self.world_size - len(self.ranks)} in {first}{also}"


def find_drift(by_rank: Mapping[int, Mapping[str, int]]) -> Drift | None:
    """Compare the ranks' fingerprints by name; a missing name counts as a difference. None: all ranks agree."""
    names = dict.fromkeys(name for numbers in by_rank.values() for name in numbers)
    different = [name for name in names if len({numbers.get(name) for numbers in by_rank.values()}) > 1]
    if not different:
        return None
    held = {rank: tuple(numbers.get(name) for name in different) for rank, numbers in by_rank.items()}
    common, count = Counter(held.values()).most_common(1)[0]
    has_majority = 2 * count > len(by_rank)
    ranks = [rank for rank, values in held.items() if values != common or not has_majority]
    return Drift(tuple(different), tuple(ranks), len(by_rank))
