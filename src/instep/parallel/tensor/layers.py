"""Layers whose weights are sharded over a tensor-parallel group.

A module stays what it is (names, state, hooks). Only its class changes to a subclass with another forward pass, and its
parameters become DTensors on the axis tp.

[Note: Open parameters]
All parameters are DTensors, including those that every rank holds whole: an optimizer that works on many tensors at
once refuses a mixture, and so does FSDP's mesh. But the user's forward pass adds `self.positions` to a plain tensor. So
while a model computes, `module.name` returns what it would in a plain model: the whole parameter as a plain tensor,
gathered if it is sharded. `parameters()`, `state_dict()` and the optimizer see DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from instep.parallel.tensor.group import TensorParallelGroup, copy_to_group, reduce_from_group, scatter_to_group
from instep.parallel.tensor.slice import Slice, record_output, record_use
from instep.world.tensors import whole_of


class ForwardPass:
    """Whether a split model computes right now, and the tensor that it copied to the group last; one for each model."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.depth = 0
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, _memo: object) -> ForwardPass:
        return self

    @property
    def is_running(self) -> bool:
        """Whether a forward pass runs, or is recomputed in backward."""
        return self.depth > 0 or torch._C._current_graph_task_id() != -1

    def begin(self) -> None:
        """Note that a forward pass begins."""
        self.depth += 1

    def end(self) -> None:
        """Note that it ends."""
        self.depth -= 1
        self._copied = None

    def copy_to_group(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the group, once for several layers in a row: then its gradient is all-reduced once."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._copied is None or self._copied[0] is not x:
            self._copied = (x, copy_to_group(x, self.group))
        return self._copied[1]


class SplitModule(nn.Module):
    """The attributes and helpers of all split modules; a subclass comes before a module's own class."""

    _pass: ForwardPass
    _path: str
    _shard_dims: dict[str, int]

    def local_shard(self, name: str) -> Any:
        """Return this rank's shard of a parameter, which is still whole while a plan is tried; None: there is none."""
        parameter: Any = self._parameters[name]
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        if parameter is None or name not in self._shard_dims:
            return parameter
        return self._pass.group.local_shard(parameter, self._shard_dims[name])

    def to_slice(self, local: torch.Tensor, size: int) -> Slice:
        """Return this rank's output columns as a Slice."""
        return record_output(Slice(local, -1, size, self._pass.group, frozenset({self._path})))


def full_tensor(x: torch.Tensor, why: str) -> torch.Tensor:
    """Return the whole of a Slice; `why` is recorded. Any other tensor is returned as it is."""
    return x.full_tensor(why) if isinstance(x, Slice) else x


class ColwiseLinear(SplitModule, nn.Linear):
    """A Linear of which each rank has some output columns; returns a Slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns."""
        copied = self._pass.copy_to_group(full_tensor(x, "linear"))
        return self.to_slice(F.linear(copied, self.local_shard("weight"), self.local_shard("bias")), self.out_features)


class GatheredColwiseLinear(ColwiseLinear):
    """A Linear of which each rank has some output columns; returns the whole tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's columns, and gather all."""
        return full_tensor(super().forward(x), "asked for")


class RowwiseLinear(SplitModule, nn.Linear):
    """A Linear of which each rank has the weights of some inputs; the ranks' terms are all-reduced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's terms, and all-reduce."""
        group = self._pass.group
        if _is_columns(x):
            record_use(x, self._path)
            local = x.local
        else:
            local = scatter_to_group(full_tensor(x, "linear"), -1, group)
        y = reduce_from_group(F.linear(local, self.local_shard("weight")), group)
        bias = self.local_shard("bias")
        return y if bias is None else y + bias


def _is_columns(x: torch.Tensor) -> TypeGuard[Slice]:
    return isinstance(x, Slice) and x.shard_dim == -1


class UndecidedLinear(SplitModule, nn.Linear):
    """A Linear that chooses its split while a plan is tried: rowwise if its input is sharded, else colwise."""

    _split: LayerSplit | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose at the first call, then compute that way."""
        if self._split is None:
            self._split = ROWWISE_LINEAR if _is_columns(x) else COLWISE_LINEAR
            self._shard_dims = self._split.shard_dims
        return self._split.base.forward(self, x)  # type: ignore[no-any-return]


class RowwiseEmbedding(SplitModule, nn.Embedding):
    """An Embedding of which each rank has some rows: the rank with a token has its vector, the others zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vectors of this rank's tokens, all-reduced."""
        group = self._pass.group
        first, count = group.shard_range(self.num_embeddings)
        is_here = (x >= first) & (x < first + count)
        padding = self.padding_idx
        vectors = F.embedding((x - first).masked_fill(~is_here, 0), self.local_shard("weight"))
        if padding is not None and first <= padding < first + count:  # its vector takes no gradient
            vectors = torch.where((x == padding)[..., None], vectors.detach(), vectors)
        return reduce_from_group(vectors.masked_fill(~is_here[..., None], 0.0), group)


class ColwiseEmbedding(SplitModule, nn.Embedding):
    """An Embedding of which each rank has some columns; returns the whole tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks."""
        weight = self.local_shard("weight")
        columns = F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return self.to_slice(columns, self.embedding_dim).full_tensor("asked for")


class HeadwiseAttention(SplitModule, nn.MultiheadAttention):
    """An nn.MultiheadAttention of which each rank has some heads."""

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
        """Attend, each rank with its heads; return what torch's own returns."""
        batched = query.dim() == 3
        same = (query is key, query is value, key is value)
        query, key, value = (full_tensor(x, "attention") for x in (query, key, value))
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
            attended = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            attended = F.scaled_dot_product_attention(q, k, v, None if causal else mask, p, causal)
        attended = attended.transpose(1, 2).flatten(2)
        if not batched:
            attended = attended.squeeze(0)
        elif not self.batch_first:
            attended = attended.transpose(0, 1)
        y = self.out_proj(attended)
        if not need_weights:
            return y, None
        weights = full_tensor(weights, "attention weights")
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights.squeeze(0)

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, same: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, each a Slice of all heads."""
        if not self._qkv_same_embed_dim:
            biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None,) * 3
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            projected = []
            for x, name, bias in zip((query, key, value), names, biases, strict=True):
                local_bias = None if bias is None else scatter_to_group(bias, 0, self._pass.group)
                local = F.linear(self._pass.copy_to_group(x), self.local_shard(name), local_bias)
                projected.append(self.to_slice(local, self.embed_dim))
            return tuple(projected)
        if all(same):
            return self._packed(query).chunk(3, -1)
        # A rank's rows of the packed weights may belong to any of the three: each input is projected by all of them.
        q, k = self._packed(query).chunk(3, -1)[0], self._packed(key).chunk(3, -1)
        return q, k[1], k[2] if same[2] else self._packed(value).chunk(3, -1)[2]

    def _packed(self, x: torch.Tensor) -> Slice:
        weight, bias = self.local_shard("in_proj_weight"), self.local_shard("in_proj_bias")
        return self.to_slice(F.linear(self._pass.copy_to_group(x), weight, bias), 3 * self.embed_dim)


def _merge_masks(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """Return one mask, to be added to the scores, for those that torch's attention takes."""
    merged = None if attn_mask is None else _additive(attn_mask, q)
    if merged is not None and merged.dim() == 3:  # by row and head
        merged = merged.unflatten(0, q.shape[:2])
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q).view(q.shape[0], 1, 1, -1)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, float("-inf"))


@dataclass(frozen=True)
class LayerSplit:
    """How a kind of module is split: the class that it gets, and the sharded dimension of each parameter."""

    base: type[SplitModule]
    shard_dims: dict[str, int]


COLWISE_LINEAR = LayerSplit(ColwiseLinear, {"weight": 0, "bias": 0})
GATHERED_COLWISE_LINEAR = LayerSplit(GatheredColwiseLinear, {"weight": 0, "bias": 0})
ROWWISE_LINEAR = LayerSplit(RowwiseLinear, {"weight": 1})
ROWWISE_EMBEDDING = LayerSplit(RowwiseEmbedding, {"weight": 0})
COLWISE_EMBEDDING = LayerSplit(ColwiseEmbedding, {"weight": 1})
UNDECIDED_LINEAR = LayerSplit(UndecidedLinear, {})
PACKED_ATTENTION = LayerSplit(HeadwiseAttention, {"in_proj_weight": 0, "in_proj_bias": 0})
SEPARATE_ATTENTION = LayerSplit(HeadwiseAttention, {"q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0})

_classes: dict[tuple[type, type | None, tuple[str, ...]], type] = {}


def change_class(module: nn.Module, split: LayerSplit | None, forward_pass: ForwardPass, path: str) -> None:
    """Change a module's forward pass (None: keep its own), and open its parameters ([Note: Open parameters])."""
    kind, base = type(module), split.base if split is not None else None
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    key = (kind, base, names)
    if key not in _classes:
        body: dict[str, Any] = {name: property(_opened(name)) for name in names}
        if isinstance(module, nn.RNNBase):  # it keeps a list of its weights, which would be outdated by the next step
            body["_flat_weights"] = property(_flat_weights, lambda _self, _value: None)
        _classes[key] = type(kind.__name__, (kind,) if base is None else (base, kind), body)
    module.__class__ = _classes[key]
    changed: Any = module
    changed._pass, changed._path = forward_pass, path
    changed._shard_dims = split.shard_dims if split is not None else {}
    if base is UndecidedLinear:
        changed._split = None


def _opened(name: str) -> Callable[[Any], Any]:
    def opened(self: Any) -> Any:
        parameter = self._parameters[name]
        return whole_of(parameter) if self._pass.is_running else parameter

    return opened


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def distribute(parameter: nn.Parameter, dim: int | None, group: TensorParallelGroup) -> nn.Parameter:
    """Return a parameter that every rank holds as a DTensor: sharded along `dim`, or replicated if that is None."""
    placement: Placement = Replicate() if dim is None else Shard(dim)
    whole = parameter.detach()
    # A copy: a view would keep the whole tensor in memory.
    local = whole if dim is None else group.local_shard(whole, dim).clone(memory_format=torch.contiguous_format)
    distributed = DTensor.from_local(
        local, group.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)
