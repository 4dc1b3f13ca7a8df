"""A tensor of which each rank of a team holds a part, and which looks whole to the code that uses it.

[Note: Slices]
Splitting a layer changes what flows out of it: each rank has a part of its columns. User code that goes on with a bare
part is wrong without an error: `.view(rows, length, num_heads, -1)` makes as many heads as before, each too narrow. So
a split layer gives a Slice. Its shape is that of the whole tensor, and each operation on it goes one of three ways:

    by rule      the result is a Slice again, computed from the parts alone (rules.py)
    joined       the parts are put together and the operation gets the whole tensor: right for any operation, and slower
    refused      an operation that writes to it, and has no rule: an error, never a wrong number

Whatever the user's code does, the answer is that of the whole model. Which operations joined is noted, for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from instep.core.errors import InstepError
from instep.parallel.tensor.team import Team, cut, enter, join


class Refused(InstepError):
    """A Slice cannot do this; the layers that it comes from must give whole tensors."""

    def __init__(self, message: str, origins: frozenset[str]) -> None:
        super().__init__(message)
        self.origins = origins


@dataclass
class Notes:
    """What was seen of the Slices of one pass."""

    joined: dict[str, str] = field(default_factory=dict)
    """By the layer that a Slice came from: why its parts were put together."""
    used: dict[str, set[str]] = field(default_factory=dict)
    """By layer that takes parts as they are: the layers that gave them."""
    last: str = ""
    """The layer that gave the newest Slice."""
    uneven_heads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By layer: into what its columns were cut, where the ranks cannot share that."""


_notes: list[Notes] = []


@contextmanager
def noting() -> Iterator[Notes]:
    """Note what happens to the Slices in this block."""
    notes = Notes()
    _notes.append(notes)
    try:
        yield notes
    finally:
        _notes.remove(notes)


class Slice(torch.Tensor):
    """A part of a tensor, along one dimension."""

    local: torch.Tensor
    """This rank's part; gradients flow through it."""
    place: int
    """The dimension that the ranks share, counted from the end: -1 is the last."""
    team: Team
    origins: frozenset[str]
    """The layers that it comes from."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, place: int, size: int, team: Team, origins: frozenset[str]) -> Slice:
        """Wrap a part of a tensor that has `size` columns in dimension `place`."""
        assert place < 0
        shape = list(local.shape)
        shape[place] = size
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.place, made.team, made.origins = local, place, team, origins
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do."""

    @property
    def size_shared(self) -> int:
        """How many columns the ranks share."""
        return int(self.shape[self.place])

    @property
    def axis(self) -> int:
        """The dimension that the ranks share, counted from the front."""
        return self.dim() + self.place

    @property
    def part(self) -> tuple[int, int, int]:
        """Which columns this rank has: their dimension, the first one, how many."""
        return (self.axis, *self.team.share(self.size_shared))

    def like(self, local: torch.Tensor, place: int | None = None, size: int | None = None) -> Slice:
        """Wrap what was computed from this part."""
        place = self.place if place is None else place
        return Slice(local, place, self.size_shared if size is None else size, self.team, self.origins)

    def whole(self, why: str) -> torch.Tensor:
        """Put the parts together. Called on all ranks."""
        for notes in _notes:
            for origin in self.origins:
                notes.joined.setdefault(origin, why)
        return join(self.local, self.axis, self.size_shared, self.team)

    def fit(self, other: torch.Tensor) -> torch.Tensor | None:
        """Give what of another tensor meets this part when both are broadcast; None: nothing does."""
        if isinstance(other, Slice):
            fits = other.place == self.place and other.size_shared == self.size_shared
            return other.local if fits else None
        if other.dim() < -self.place or other.shape[self.place] == 1:
            return enter(other, self.team)
        return cut(other, self.place, self.team) if other.shape[self.place] == self.size_shared else None

    def __deepcopy__(self, _memo: object) -> Slice:
        raise Refused("a part of a tensor cannot be copied deeply", self.origins)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Slice({tuple(self.shape)}, dim {self.place} shared by {self.team.size}, {tuple(self.local.shape)} here)"
        )

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
            found = rule(func, args, kwargs)
            if found is not NotImplemented:
                return found
        return _on_whole(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types, kwargs
        found = next((a for a in args if isinstance(a, Slice)), None)
        raise Refused(f"{func} came past the rules for split tensors", found.origins if found else frozenset())


def _on_whole(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Compute with whole tensors; refuse what would write to a copy that nobody sees."""
    first = args[0] if args else None
    writes = name.endswith("_") and not name.endswith("__")
    if isinstance(first, Slice) and (writes or name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE)):
        raise Refused(f"{name} writes to a tensor of which each rank holds a part", first.origins)
    args, kwargs = tree_map_only(Slice, lambda each: each.whole(name), (args, kwargs))
    return func(*args, **kwargs)


_IN_PLACE = {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "floordiv", "mod", "and", "or", "xor")
}


def union(slices: list[Slice]) -> frozenset[str]:
    """The layers that several Slices come from."""
    return frozenset().union(*(each.origins for each in slices))


def note_new(made: Slice) -> Slice:
    """Note a Slice that a layer gives."""
    for notes in _notes:
        notes.last = next(iter(made.origins))
    return made


def note_use(part: Slice, consumer: str) -> None:
    """Note that a layer takes a part as it is."""
    for notes in _notes:
        notes.used.setdefault(consumer, set()).update(part.origins)


def note_uneven(part: Slice, sizes: tuple[int, ...]) -> None:
    """Note that columns were cut into what the ranks cannot share."""
    for notes in _notes:
        for origin in part.origins:
            notes.uneven_heads.setdefault(origin, sizes)
