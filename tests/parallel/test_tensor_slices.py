"""Slices: each operation gives what it gives for the whole tensor, forward and backward; what cannot is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from instep.core.mesh import Mesh
from instep.parallel.tensor.group import TensorParallelGroup, scatter_to_group
from instep.parallel.tensor.slice import Refused, Slice, SliceRecord, record_slices
from instep.world.grid import Grid
from instep.world.world import World
from ranks import run_ranks

Operation = Callable[[torch.Tensor, torch.Tensor], Any]
"""Of a tensor (2, 3, 24) whose last dimension is sharded, and a plain parameter (24,)."""


def heads(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.view(2, 3, 8, -1).transpose(1, 2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., 1:], x[..., :1]), dim=-1)


def packed(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.view(2, 3, 3, 4, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 3, 8)


def chunked(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in x.chunk(3, dim=-1))
    return ((q @ k.mT) * 0.5).softmax(-1) @ v


def grouped(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.split([16, 4, 4], dim=-1)
    q, k, v = q.view(2, 3, 8, 2), k.view(2, 3, 2, 2), v.view(2, 3, 2, 2)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def add_to_itself(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += p
    return F.relu(y, inplace=True)


BY_RULE: dict[str, Operation] = {
    "gelu": lambda x, p: F.gelu(x),
    "silu_times": lambda x, p: F.silu(x) * x,
    "plus_parameter": lambda x, p: x + p,
    "parameter_minus": lambda x, p: p - x,
    "scalar": lambda x, p: 1 / (2 + x**2) - x / 3,
    "times_one_weight": lambda x, p: x * p[:1],
    "in_place": add_to_itself,
    "heads": lambda x, p: heads(x).contiguous(),
    "heads_and_back": lambda x, p: heads(x).transpose(1, 2).flatten(2),
    "head_norm": lambda x, p: F.layer_norm(heads(x), (3,), p[:3], p[3:6]),
    "head_rms_norm": lambda x, p: F.rms_norm(heads(x), (3,), p[:3]),
    "head_linear": lambda x, p: F.linear(heads(x), p[:6].view(2, 3)),
    "head_bias": lambda x, p: heads(x) + p[:8].view(8, 1, 1),
    "scores": lambda x, p: (heads(x) @ heads(x).transpose(-2, -1)).softmax(dim=-1) @ heads(x),
    "masked": lambda x, p: heads(x).masked_fill(torch.ones(3, 3).triu().bool(), -1.0),
    "attention": lambda x, p: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), p[:9].view(3, 3)),
    "attention_bias_by_head": lambda x, p: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), attn_mask=p[:8].view(8, 1, 1).expand(8, 3, 3), scale=0.3
    ),
    "rotary": lambda x, p: heads(x) * p[:3].cos() + rotate(heads(x)) * p[3:6].sin(),
    "packed": lambda x, p: packed(x),
    "chunked": lambda x, p: chunked(x),
    "grouped": lambda x, p: grouped(x),
    "two_in_one": lambda x, p: F.silu(x.chunk(2, -1)[0]) * x.view(2, 3, 2, 4, 3)[..., 1, :, :].flatten(2),
    "six_heads": lambda x, p: x.view(2, 3, 6, -1).transpose(1, 2) * 2,
    "repeated_keys": lambda x, p: heads(x)[:, :, None].expand(2, 8, 2, 3, 3).reshape(2, 16, 3, 3),
    "reductions": lambda x, p: x.sum(0) + x.mean(dim=1).amax(0) + x.mean((0, 1), keepdim=True),
    "index": lambda x, p: x[0, 1:, None, ...] * x[:1, ..., :].unsqueeze(2)[..., :, :].squeeze(2)[0, 0],
    "unbind": lambda x, p: sum(x.unbind(1)) + next(iter(x))[1],
    "cat": lambda x, p: torch.cat([x, p.expand(2, 1, 24)], 1),
    "where": lambda x, p: torch.where(x > 0, x, p),
    "moved": lambda x, p: x.movedim(-1, 0).mT.unflatten(0, (4, 6)),
    "dtype": lambda x, p: x.float().double().to(torch.float64).detach() + x.clone(),
    "view_as": lambda x, p: x.view_as(x).reshape(6, 24).reshape_as(x),
}
GATHERED: dict[str, Operation] = {
    "layer_norm": lambda x, p: F.layer_norm(x, (24,), p),
    "sum": lambda x, p: x.sum(),
    "softmax": lambda x, p: x.softmax(-1),
    "interleaved": lambda x, p: x.reshape(-1) * 2,
    "einsum": lambda x, p: torch.einsum("btc,c->bt", x, p),
    "part_of_columns": lambda x, p: x[..., :5] + 1,
    "cumsum": lambda x, p: x.cumsum(-1),
    "linear": lambda x, p: F.linear(x, p.view(1, 24)),
    "sorted": lambda x, p: x.sort(-1).values,
    "other_layout": lambda x, p: heads(x) @ x.view(2, 8, 3, 3),
    "glu": lambda x, p: F.glu(x),
}
REFUSED: dict[str, Operation] = {
    "setitem": lambda x, p: x.__setitem__(0, 0.0),
    "cumsum_": lambda x, p: x.cumsum_(-1),
    "out": lambda x, p: torch.add(x, p, out=torch.empty(2, 3, 24)),
}


def grid_of(world: World) -> Grid:
    return Grid.open(world, Mesh(tp=world.world_size))


def tried(world: World, name: str) -> tuple[list[torch.Tensor], SliceRecord, bool]:
    """Apply an operation to a whole tensor and to a Slice of it; return outputs and gradients of both."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(2, 3, 24, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 3, 24, generator=generator, dtype=torch.float64)
    result: list[torch.Tensor] = []
    operation = {**BY_RULE, **GATHERED}[name]
    group = TensorParallelGroup(grid_of(world))
    for split in (False, True):
        x, p = start.clone().requires_grad_(), weights[0, 0].clone().requires_grad_()
        given: torch.Tensor = Slice(scatter_to_group(x, -1, group), -1, 24, group, frozenset({"up"})) if split else x
        with record_slices() as record:
            y = operation(given, p)
        was_split = isinstance(y, Slice)
        y = y.full_tensor("test") if isinstance(y, Slice) else y
        (y * torch.cos(torch.arange(y.numel()).view_as(y))).sum().backward()
        result += [y.detach(), x.grad, p.grad if p.grad is not None else torch.zeros(24)]
    return result, record, was_split


def try_all(world: World) -> tuple[dict[str, Any], dict[str, str]]:
    return {name: tried(world, name) for name in (*BY_RULE, *GATHERED)}, refuse_all(world)


def refuse_all(world: World) -> dict[str, str]:
    group, message = TensorParallelGroup(grid_of(world)), {}
    for name, operation in REFUSED.items():
        part = Slice(torch.ones(2, 3, 24 // world.world_size), -1, 24, group, frozenset({"up"}))
        try:
            operation(part, torch.ones(24))
        except Refused as error:
            message[name] = str(error)
    return message


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_slice_gives_what_the_whole_tensor_gives(world_size: int) -> None:
    for by_name, message in run_ranks(try_all, world_size):
        for name, ((y, x_grad, p_grad, *of_slice), record, was_split) in by_name.items():
            for expected, result in zip((y, x_grad, p_grad), of_slice, strict=True):
                assert torch.allclose(expected, result, rtol=1e-12, atol=1e-12), name
            by_rule = name in BY_RULE and not (name in ("grouped", "six_heads") and world_size == 4)
            assert was_split or not by_rule, name
            assert record.gathered.keys() == (set() if by_rule else {"up"}), name
        uneven = by_name["six_heads"][1].uneven_heads
        assert uneven == ({"up": (6, 4)} if world_size == 4 else {})
        assert set(message) == set(REFUSED)
        assert "writes to a tensor of which each rank holds a shard" in message["setitem"]
