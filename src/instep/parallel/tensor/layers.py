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


class _Split(nn.Module):
    """What all exchanged modules know."""

    _computing: Computing
    _path: str
    _cuts: dict[str, int]

    def _local(self, name: str) -> torch.Tensor | None:
        """This rank's part of a parameter, which is still whole while a plan is tried."""
        parameter = self._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return None if parameter is None else parameter.to_local()
        return self._computing.team.take(parameter, self._cuts[name]) if name in self._cuts else parameter

    def _give(self, part: torch.Tensor, size: int) -> Slice:
        return note_new(Slice(part, -1, size, self._computing.team, frozenset({self._path})))


def _plain(x: torch.Tensor, why: str) -> torch.Tensor:
    return x.whole(why) if isinstance(x, Slice) else x


class Columns(_Split):
    """A Linear of which each rank has some output columns; gives a Slice."""

    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns."""
        return self._columns(x)

    def _columns(self, x: torch.Tensor) -> Slice:
        entered = self._computing.enter(_plain(x, "linear"))
        weight = self._local("weight")
        assert weight is not None
        return self._give(F.linear(entered, weight, self._local("bias")), self.out_features)


class WholeColumns(Columns):
    """A Linear of which each rank has some output columns, put together for whoever comes next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns, and join them."""
        return self._columns(x).whole("asked for")


class Rows(_Split):
    """A Linear of which each rank has the weights of some inputs; their terms are added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's terms, and add up."""
        team = self._computing.team
        if isinstance(x, Slice) and x.place == -1:
            note_use(x, self._path)
            part = x.local
        else:
            part = cut(_plain(x, "linear"), -1, team)
        weight = self._local("weight")
        assert weight is not None
        y = add(F.linear(part, weight), team)
        bias = self._local("bias")
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


class Vocabulary(_Split):
    """An Embedding of which each rank has some rows: who has a word gives its vector, the others zeros."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up the words that this rank has, and add up."""
        team = self._computing.team
        weight = self._local("weight")
        assert weight is not None
        first, count = team.share(self.num_embeddings)
        here = (x >= first) & (x < first + count)
        padding = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + count else None
        found = F.embedding((x - first).masked_fill(~here, 0), weight)
        if padding is not None:  # its vector takes no gradient
            found = torch.where((x == first + padding)[..., None], found.detach(), found)
        return add(found.masked_fill(~here[..., None], 0.0), team)


class Features(_Split):
    """An Embedding of which each rank has some columns, put together for whoever comes next."""

    embedding_dim: int
    padding_idx: int | None
    scale_grad_by_freq: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up this rank's columns, and join them."""
        weight = self._local("weight")
        assert weight is not None
        found = F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return self._give(found, self.embedding_dim).whole("asked for")


class Heads(_Split):
    """An nn.MultiheadAttention of which each rank has some heads."""

    embed_dim: int
    num_heads: int
    head_dim: int
    batch_first: bool
    dropout: float
    out_proj: nn.Linear
    in_proj_bias: nn.Parameter | None
    _qkv_same_embed_dim: bool

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, each rank with its heads; give what torch's own gives."""
        batched = query.dim() == 3
        same = (query is key, query is value, key is value)
        query, key, value = (_plain(x, "attention") for x in (query, key, value))
        q, k, v = self._project(query, key, value, same)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = _merge_masks(attn_mask, key_padding_mask, q)
        p = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, p, True) if p else weights
            found = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            found = F.scaled_dot_product_attention(q, k, v, None if causal else mask, p, causal)
        found = found.transpose(1, 2).flatten(2)
        if not batched:
            found = found.squeeze(0)
        elif not self.batch_first:
            found = found.transpose(0, 1)
        y = self.out_proj(found)
        if not need_weights:
            return y, None
        weights = _plain(weights, "attention weights")
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights.squeeze(0)

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, same: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor, ...]:
        """Give queries, keys and values, each a Slice of all heads."""
        if not self._qkv_same_embed_dim:
            whole = self.in_proj_bias
            biases = whole.chunk(3) if whole is not None else (None,) * 3
            team, names = self._computing.team, ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            found = []
            for x, name, bias in zip((query, key, value), names, biases, strict=True):
                weight, part = self._local(name), None if bias is None else cut(bias, 0, team)
                assert weight is not None
                found.append(self._give(F.linear(self._computing.enter(x), weight, part), self.embed_dim))
            return tuple(found)
        if all(same):
            return self._packed(query).chunk(3, -1)
        # A rank's rows of the packed weights may be of any of the three: each input goes through all of them.
        q, k = self._packed(query).chunk(3, -1)[0], self._packed(key).chunk(3, -1)
        return q, k[1], k[2] if same[2] else self._packed(value).chunk(3, -1)[2]

    def _packed(self, x: torch.Tensor) -> Slice:
        weight = self._local("in_proj_weight")
        assert weight is not None
        return self._give(F.linear(self._computing.enter(x), weight, self._local("in_proj_bias")), 3 * self.embed_dim)


def _merge_masks(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """Make one mask, to be added to the scores, of those that torch's attention takes."""
    merged = None
    num_rows, num_heads = q.shape[:2]
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, q)
        many = attn_mask.dim() == 3
        merged = attn_mask.view(num_rows, num_heads, *attn_mask.shape[1:]) if many else attn_mask
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q)
        padding = padding.view(num_rows, 1, 1, -1)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, float("-inf"))


@dataclass(frozen=True)
class Way:
    """How a kind of module is split: the class that it gets, and along which dimension each parameter is cut."""

    base: type[_Split]
    cuts: dict[str, int]


LINEAR_COLUMNS = Way(Columns, {"weight": 0, "bias": 0})
LINEAR_WHOLE_COLUMNS = Way(WholeColumns, {"weight": 0, "bias": 0})
LINEAR_ROWS = Way(Rows, {"weight": 1})
EMBEDDING_ROWS = Way(Vocabulary, {"weight": 0})
EMBEDDING_COLUMNS = Way(Features, {"weight": 1})
ATTENTION_HEADS = Way(Heads, {"in_proj_weight": 0, "in_proj_bias": 0})
LINEAR_UNDECIDED = Way(Undecided, {})
ATTENTION_HEADS_UNPACKED = Way(Heads, {"q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0})

_classes: dict[tuple[type, type | None, tuple[str, ...]], type] = {}


def exchange_class(module: nn.Module, way: Way | None, computing: Computing, path: str) -> None:
    """Give a module another forward pass (None: its own), and open its parameters ([Note: Open parameters])."""
    kind, base = type(module), way.base if way is not None else None
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    key = (kind, base, names)
    if key not in _classes:
        body: dict[str, Any] = {name: property(_opener(name)) for name in names}
        if isinstance(module, nn.RNNBase):  # it keeps a list of its own
            body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
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


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """Give a parameter as a plain tensor, gathered where ranks share it. Called on all ranks of the team."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not all(isinstance(placement, Replicate) for placement in parameter.placements):
        parameter = parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim)
    return parameter.to_local()


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
