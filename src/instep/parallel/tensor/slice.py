"""A tensor of which each rank of a group holds a shard, and which looks whole to the code that uses it.

[Note: Slices]
Splitting a layer changes its output: each rank has some of its columns. User code that computes with a bare shard is
wrong without an error: `.view(rows, length, num_heads, -1)` makes as many heads as before, each too narrow. So a split
layer returns a Slice. Its shape is that of the whole tensor, and each operation on it is done in one of three ways:

    by rule    the result is a Slice, computed from the shards alone (rules.py)
    gathered   the shards are all-gathered and the operation gets the whole tensor: right for any operation, but slower
    refused    an operation that writes to a Slice, and has no rule: an error, never a wrong number

Whatever the user's code does, its result is that of the whole model. Operations that gather are recorded, for the plan.

[Note: Slice or DTensor]
DTensor activations were tried in place of Slices, with torch 2.13 on CPU, 2 and 4 gloo ranks: once all parameters and
inputs as DTensors under `implicit_replication`, once ColwiseParallel(use_local_output=False) with RowwiseParallel.
Much works: of the 8 models of tests/parallel/tensor_recipes.py, 7 have the right outputs and gradients on 2 ranks in at
least one of the two ways. What does not:

    qkv.view(rows, length, 3, heads, -1)   RuntimeError: Cannot unflatten unevenly sharded tensor (a fused projection)
    6 heads on 4 ranks                     the same error, where a Slice is gathered
    qkv.chunk(3, -1)                       right, but gathered; a Slice is redistributed, and stays split
    scaled_dot_product_attention           NotImplementedError on CPU: the flash kernel has no sharding strategy
    x.cumsum(-1) of a sharded dimension    a wrong result without an error
    nn.MultiheadAttention                  not split by heads

Of the 43 operations of test_tensor_slices.py, 2 raise and 1 is wrong on 2 ranks; 4 raise and 1 is wrong on 4. A step
(forward and backward, 4 blocks, 2 ranks with 1 thread each; CPU time of a rank, least of 25 in turns) takes:

    width, length, rows     Slice       all DTensor    ColwiseParallel
    64, 16, 4               21.5 ms     35.6 ms        50.5 ms
    256, 64, 8              123 ms      139 ms         146 ms

So Slices stay: they are more general and faster, and DTensor would need a fallback for what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from instep.core.errors import InstepError
from instep.parallel.tensor.group import TensorParallelGroup, copy_to_group, gather_from_group, scatter_to_group


class Refused(InstepError):
    """A Slice cannot do this; the layers that it comes from must return whole tensors."""

    def __init__(self, message: str, origins: frozenset[str]) -> None:
        super().__init__(message)
        self.origins = origins


@dataclass
class SliceRecord:
    """What happened to the Slices of one pass."""

    gathered: dict[str, str] = field(default_factory=dict)
    """By the layer that a Slice came from: why it was gathered."""
    used: dict[str, set[str]] = field(default_factory=dict)
    """By layer that takes shards: the layers that returned them."""
    last: str = ""
    """The layer that returned the newest Slice."""
    uneven_heads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By layer: the sizes into which its columns were split, where the ranks cannot shard these."""


_records: list[SliceRecord] = []


@contextmanager
def record_slices() -> Iterator[SliceRecord]:
    """Record what happens to the Slices in this block."""
    record = SliceRecord()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


class Slice(torch.Tensor):
    """A shard of a tensor, along one dimension."""

    local: torch.Tensor
    """This rank's shard; gradients flow through it."""
    shard_dim: int
    """The dimension that is sharded, counted from the end: -1 is the last."""
    group: TensorParallelGroup
    origins: frozenset[str]
    """The layers that it comes from."""

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shard_dim: int, size: int, group: TensorParallelGroup, origins: frozenset[str]
    ) -> Slice:
        """Wrap a shard of a tensor that has `size` columns in dimension `shard_dim`."""
        assert shard_dim < 0
        shape = list(local.shape)
        shape[shard_dim] = size
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.shard_dim, made.group, made.origins = local, shard_dim, group, origins
        return made

    def __init__(self, *_: Any) -> None:
        """Do nothing: `__new__` has done it."""

    @property
    def full_size(self) -> int:
        """The number of columns on all ranks."""
        return int(self.shape[self.shard_dim])

    @property
    def positive_dim(self) -> int:
        """The dimension that is sharded, counted from the front."""
        return self.dim() + self.shard_dim

    @property
    def local_range(self) -> tuple[int, int, int]:
        """The columns of this rank: their dimension, the first one, how many."""
        return (self.positive_dim, *self.group.shard_range(self.full_size))

    def with_local(
        self, local: torch.Tensor, shard_dim: int | None = None, size: int | None = None, sources: Iterable[Slice] = ()
    ) -> Slice:
        """Wrap what was computed from this shard, and from those of `sources`."""
        shard_dim = self.shard_dim if shard_dim is None else shard_dim
        origins = self.origins.union(*(source.origins for source in sources))
        return Slice(local, shard_dim, self.full_size if size is None else size, self.group, origins)

    def full_tensor(self, why: str) -> torch.Tensor:
        """Return the whole tensor. Called on all ranks."""
        for record in _records:
            for origin in self.origins:
                record.gathered.setdefault(origin, why)
        return gather_from_group(self.local, self.positive_dim, self.full_size, self.group)

    def local_of(self, other: torch.Tensor) -> torch.Tensor | None:
        """Return what another tensor broadcasts to this shard; None: the two do not fit."""
        if isinstance(other, Slice):
            fits = other.shard_dim == self.shard_dim and other.full_size == self.full_size
            return other.local if fits else None
        if other.dim() < -self.shard_dim or other.shape[self.shard_dim] == 1:
            return copy_to_group(other, self.group)
        fits = other.shape[self.shard_dim] == self.full_size
        return scatter_to_group(other, self.shard_dim, self.group) if fits else None

    def __deepcopy__(self, _memo: object) -> Slice:
        raise Refused("a shard of a tensor cannot be deep-copied", self.origins)

    def __repr__(self) -> str:  # type: ignore[override]
        ranks, local = self.group.size, tuple(self.local.shape)
        return f"Slice({tuple(self.shape)}, dim {self.shard_dim} sharded over {ranks} ranks, {local} here)"

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from instep.parallel.tensor.rules import METADATA, RULES  # they need this class

        kwargs = kwargs or {}
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise Refused(f"{name}(out=…) has no rule for split tensors", frozenset())
        rule = RULES.get(name)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_full_tensors(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types, kwargs
        origins = next((a.origins for a in args if isinstance(a, Slice)), frozenset[str]())
        raise Refused(f"{func} bypasses the rules for split tensors", origins)


def _on_full_tensors(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Compute with whole tensors; refuse an operation that would write to a gathered copy."""
    first = args[0] if args else None
    writes = name.endswith("_") and not name.endswith("__")
    if isinstance(first, Slice) and (writes or name == "__setitem__" or name in _IN_PLACE):
        raise Refused(f"{name} writes to a tensor of which each rank holds a shard", first.origins)
    args, kwargs = tree_map_only(Slice, lambda x: x.full_tensor(name), (args, kwargs))
    return func(*args, **kwargs)


_IN_PLACE = {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "floordiv", "mod", "and", "or", "xor")
}


def record_output(made: Slice) -> Slice:
    """Record a Slice that a layer returns."""
    for record in _records:
        record.last = next(iter(made.origins))
    return made


def record_use(x: Slice, consumer: str) -> None:
    """Record that a layer computes with a shard."""
    for record in _records:
        record.used.setdefault(consumer, set()).update(x.origins)


def record_uneven(x: Slice, sizes: tuple[int, ...]) -> None:
    """Record that columns were split into sizes that the ranks cannot shard."""
    for record in _records:
        for origin in x.origins:
            record.uneven_heads.setdefault(origin, sizes)
