"""Layers whose weights a team of ranks shares.

A module stays what it is (names, state, hooks): only its class is exchanged for a subclass with another forward pass,
and its parameters become DTensors on the axis tp. `split` does that, `undo` takes it back.

[Note: Open parameters]
All parameters are DTensors, also those that every rank holds whole: an optimizer that works on many at once refuses a
mixture, and so does FSDP's mesh. But the user's forward pass adds `self.positions` to a plain tensor. So while a model
computes, `module.name` gives what a plain model would: the whole parameter as a plain tensor, gathered where ranks
share it. `parameters()`, `state_dict()` and the optimizer see DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from instep.parallel.tensor.slice import Slice, note_new, note_use
from instep.parallel.tensor.team import Team, add, cut, enter
from instep.world.tensors import whole_of


class Computing:
    """Whether a split model computes right now, and what it used last; one a model."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.depth = 0
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, _memo: object) -> Computing:
        return self

    @property
    def is_on(self) -> bool:
        """Whether a forward pass runs, be it once more for its backward pass."""
        return self.depth > 0 or torch._C._current_graph_task_id() != -1

    def begin(self) -> None:
        """Note that a forward pass begins."""
        self.depth += 1

    def end(self) -> None:
        """Note that it ends."""
        self.depth -= 1
        self._entered = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Enter a tensor, once where several layers use it: then its gradients are added up once, too."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._entered is None or self._entered[0] is not x:
            self._entered = (x, enter(x, self.team))
        return self._entered[1]


class SplitModule(nn.Module):
    """What all exchanged modules know."""

    _computing: Computing
    _path: str
    _cuts: dict[str, int]

    def local(self, name: str) -> torch.Tensor | None:
        """This rank's part of a parameter, which is still whole while a plan is tried."""
        parameter = self._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return None if parameter is None else parameter.to_local()
        return self._computing.team.take(parameter, self._cuts[name]) if name in self._cuts else parameter

    def give(self, part: torch.Tensor, size: int) -> Slice:
        """Give this rank's output columns."""
        return note_new(Slice(part, -1, size, self._computing.team, frozenset({self._path})))


def plain(x: torch.Tensor, why: str) -> torch.Tensor:
    """Give a whole tensor, joined for what is said."""
    return x.whole(why) if isinstance(x, Slice) else x


class Columns(SplitModule):
    """A Linear of which each rank has some output columns; gives a Slice."""

    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns."""
        return self._columns(x)

    def _columns(self, x: torch.Tensor) -> Slice:
        entered = self._computing.enter(plain(x, "linear"))
        weight = self.local("weight")
        assert weight is not None
        return self.give(F.linear(entered, weight, self.local("bias")), self.out_features)


class WholeColumns(Columns):
    """A Linear of which each rank has some output columns, put together for whoever comes next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns, and join them."""
        return self._columns(x).whole("asked for")


class Rows(SplitModule):
    """A Linear of which each rank has the weights of some inputs; their terms are added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's terms, and add up."""
        team = self._computing.team
        if isinstance(x, Slice) and x.place == -1:
            note_use(x, self._path)
            part = x.local
        else:
            part = cut(plain(x, "linear"), -1, team)
        weight = self.local("weight")
        assert weight is not None
        y = add(F.linear(part, weight), team)
        bias = self.local("bias")
        return y if bias is None else y + bias


class Undecided(Columns, Rows):
    """A Linear whose way is found while it is tried: by rows if a part of its input comes, else by columns."""

    in_features: int
    _way: Way | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Decide at the first call, then go that way."""
        if self._way is None:
            comes_in_parts = isinstance(x, Slice) and x.place == -1
            self._way = LINEAR_ROWS if comes_in_parts else LINEAR_COLUMNS
            self._cuts = self._way.cuts
        return Rows.forward(self, x) if self._way is LINEAR_ROWS else self._columns(x)


class Vocabulary(SplitModule):
    """An Embedding of which each rank has some rows: who has a word gives its vector, the others zeros."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up the words that this rank has, and add up."""
        team = self._computing.team
        weight = self.local("weight")
        assert weight is not None
        first, count = team.share(self.num_embeddings)
        here = (x >= first) & (x < first + count)
        padding = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + count else None
        found = F.embedding((x - first).masked_fill(~here, 0), weight)
        if padding is not None:  # its vector takes no gradient
            found = torch.where((x == first + padding)[..., None], found.detach(), found)
        return add(found.masked_fill(~here[..., None], 0.0), team)


class Features(SplitModule):
    """An Embedding of which each rank has some columns, put together for whoever comes next."""

    embedding_dim: int
    padding_idx: int | None
    scale_grad_by_freq: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up this rank's columns, and join them."""
        weight = self.local("weight")
        assert weight is not None
        found = F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return self.give(found, self.embedding_dim).whole("asked for")


@dataclass(frozen=True)
class Way:
    """How a kind of module is split: the class that it gets, and along which dimension each parameter is cut."""

    base: type[SplitModule]
    cuts: dict[str, int]


LINEAR_COLUMNS = Way(Columns, {"weight": 0, "bias": 0})
LINEAR_WHOLE_COLUMNS = Way(WholeColumns, {"weight": 0, "bias": 0})
LINEAR_ROWS = Way(Rows, {"weight": 1})
EMBEDDING_ROWS = Way(Vocabulary, {"weight": 0})
EMBEDDING_COLUMNS = Way(Features, {"weight": 1})
LINEAR_UNDECIDED = Way(Undecided, {})

_classes: dict[tuple[type, type | None, tuple[str, ...]], type] = {}


def exchange_class(module: nn.Module, way: Way | None, computing: Computing, path: str) -> None:
    """Give a module another forward pass (None: its own), and open its parameters ([Note: Open parameters])."""
    kind, base = type(module), way.base if way is not None else None
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    key = (kind, base, names)
    if key not in _classes:
        body: dict[str, Any] = {name: property(_opener(name)) for name in names}
        if isinstance(module, nn.RNNBase):  # it keeps a list of its own
            body["_flat_weights"] = property(_flat_weights, _keep_nothing)
        if base is not None:
            body["forward"] = base.forward
        _classes[key] = type(kind.__name__, (kind,) if base is None else (kind, base), body)
    module.__class__ = _classes[key]
    own: Any = module
    own._computing, own._path, own._cuts = computing, path, way.cuts if way is not None else {}
    if base is Undecided:
        own._way = None


def _opener(name: str) -> Callable[[Any], Any]:
    def opened(self: Any) -> Any:
        parameter = self._parameters[name]
        return whole_of(parameter) if self._computing.is_on else parameter

    return opened


def _keep_nothing(_self: Any, _value: Any) -> None:
    """Stand in for what stores a list of weights, which would be an old one by the next step."""


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def distribute(parameter: nn.Parameter, dim: int | None, team: Team) -> nn.Parameter:
    """Make a parameter that every rank holds one of which each keeps its part; None: each keeps it whole."""
    placement: Placement = Replicate() if dim is None else Shard(dim)
    whole = parameter.detach()
    # A copy: a view would keep the whole tensor in memory.
    local = whole if dim is None else team.take(whole, dim).clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(
        local, team.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
