"""torch's own attention, with some heads on each rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from instep.parallel.tensor.group import scatter_to_group
from instep.parallel.tensor.layers import LayerSplit, SplitModule, full_tensor
from instep.parallel.tensor.slice import Slice


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
    merged = None
    num_rows, num_heads = q.shape[:2]
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, q)
        by_head = attn_mask.dim() == 3
        merged = attn_mask.view(num_rows, num_heads, *attn_mask.shape[1:]) if by_head else attn_mask
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q).view(num_rows, 1, 1, -1)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, float("-inf"))


PACKED = LayerSplit(HeadwiseAttention, {"in_proj_weight": 0, "in_proj_bias": 0})
UNPACKED = LayerSplit(HeadwiseAttention, {"q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0})
