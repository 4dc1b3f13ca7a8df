"""Dropout by row: any split gives the same masks, and they are good ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import RowDropout, keep_mask, replace_dropout

CPU = torch.device("cpu")


def mask(shape: tuple[int, ...], first: int, local: int, step: int = 1, p: float = 0.3, layer: int = 0) -> torch.Tensor:
    context = BatchContext(CPU, seed=7)
    dropout = RowDropout(p, context, layer)
    context.begin_step(step)
    context.begin_part(first, local, replicated=False)
    return dropout(torch.ones(shape)) != 0


@given(rows=st.integers(2, 30), cut=st.data(), columns=st.integers(1, 9), tokens=st.integers(1, 3))
def test_a_split_gives_the_rows_of_the_whole(rows: int, cut: st.DataObject, columns: int, tokens: int) -> None:
    at = cut.draw(st.integers(1, rows - 1))
    whole = mask((rows * tokens, columns), 0, rows)
    assert torch.equal(mask((at * tokens, columns), 0, at), whole[: at * tokens])
    assert torch.equal(mask(((rows - at) * tokens, columns), at, rows - at), whole[at * tokens :])


def test_rows_in_the_second_dimension() -> None:
    whole = mask((5, 8, 3), 0, 8)
    assert torch.equal(mask((5, 6, 3), 2, 6), whole[:, 2:])


@given(heads=st.integers(1, 3), queries=st.integers(1, 7), keys=st.integers(1, 7), more=st.integers(0, 5))
def test_padding_does_not_change_the_mask_of_attention(heads: int, queries: int, keys: int, more: int) -> None:
    padded = mask((4, heads, queries + more, keys + more), 0, 4)
    assert torch.equal(mask((4, heads, queries, keys), 0, 4), padded[:, :, :queries, :keys])
    assert torch.equal(mask((3, heads, queries, keys), 1, 3), padded[1:, :, :queries, :keys])


def test_a_part_of_the_heads_gives_those_of_the_whole() -> None:
    masks = []
    for part in (None, (1, 2, 2), (3, 2, 4)):
        context = BatchContext(CPU, seed=7)
        context.begin_step(1)
        context.read_noise()
        context.begin_part(3, 5, replicated=False)
        masks.append(keep_mask(context, (77, 0), torch.Size((5, 4, 3, 6)), 40000, part, ""))
    assert torch.equal(masks[1], masks[0][:, 2:])
    assert torch.equal(masks[2], masks[0][:, :, :, 2:])


@given(
    rows=st.integers(1, 5), middle=st.integers(1, 3), columns=st.integers(2, 9), dim=st.integers(1, 2), cut=st.data()
)
def test_a_part_of_the_columns_gives_those_of_the_whole(
    rows: int, middle: int, columns: int, dim: int, cut: st.DataObject
) -> None:
    shape = [rows, middle, columns]
    first = cut.draw(st.integers(0, shape[dim] - 1))
    count = cut.draw(st.integers(1, shape[dim] - first))
    result = []
    for part in (None, (dim, first, count)):
        context = BatchContext(CPU, seed=7)
        context.begin_step(1)
        context.read_noise()
        context.begin_part(3, rows, replicated=False)
        result.append(keep_mask(context, (77, 0), torch.Size(shape), 40000, part, ""))
    whole, own = result
    # Where two parts would share a hash, the whole is drawn.
    assert torch.equal(own, whole.narrow(dim, first, count) if own.shape != whole.shape else whole)
    inner = columns if dim == 1 else 1
    assert own.shape[dim] == count or any(size * inner % 2 for size in (first, count, shape[dim]))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_over_many_steps(p: float) -> None:
    """The rates of 300 steps scatter as coin throws do: neither too far nor too close."""
    n = 64 * 256
    rates = [float(mask((64, 256), 0, 64, step, p).double().mean()) for step in range(300)]
    scores = [(rate - (1 - p)) / math.sqrt(p * (1 - p) / n) for rate in rates]
    mean, spread = sum(scores) / 300, math.sqrt(sum(s * s for s in scores) / 300)
    assert abs(mean) < 0.25
    assert 0.85 < spread < 1.15


def test_rows_columns_steps_layers_and_uses_are_independent() -> None:
    size = (512, 256)
    first = mask(size, 0, 512).double()
    bound = 6 / math.sqrt(512)
    columns = torch.corrcoef(first.T) - torch.eye(256)
    rows = torch.corrcoef(first) - torch.eye(512)
    assert columns.abs().max() < bound
    assert rows.abs().max() < 6 / math.sqrt(256)
    context = BatchContext(CPU, seed=7)
    layer = RowDropout(0.3, context, 0)
    context.begin_step(1)
    context.begin_part(0, 512, replicated=False)
    uses = [(layer(torch.ones(size)) != 0).double() for _ in range(2)]
    assert torch.equal(uses[0], first)
    for other in (uses[1], mask(size, 0, 512, step=2).double(), mask(size, 0, 512, layer=1).double()):
        pair = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))
        assert abs(float(pair[0, 1])) < 6 / math.sqrt(first.numel())


def test_the_expectation_is_exact() -> None:
    context = BatchContext(CPU, seed=1)
    layer = RowDropout(0.1, context, 0)
    total = 0.0
    for step in range(200):
        context.begin_step(step)
        context.begin_part(0, 64, replicated=False)
        total += float(layer(torch.ones(64, 128)).mean())
    assert total / 200 == pytest.approx(1, abs=4 * math.sqrt(0.11 / (200 * 64 * 128)))


def test_every_dropout_of_a_model_is_replaced() -> None:
    context = BatchContext(CPU, seed=1)
    twice = nn.Dropout(0.5)
    model = nn.Sequential(
        nn.Linear(2, 2), twice, nn.Sequential(nn.Dropout2d(0.2)), twice, nn.TransformerEncoderLayer(4, 2)
    )
    owned = replace_dropout(model, context)
    kinds = [type(m) for m in owned.modules()]
    assert nn.Dropout not in kinds
    assert nn.Dropout2d not in kinds
    assert kinds.count(RowDropout) == 5
    assert owned[1] is owned[3]
    assert owned[2][0].channels
    assert isinstance(owned[1], nn.Dropout)
    x = torch.randn(4, 3, 5, 5)
    context.begin_part(0, 4, replicated=False)
    y = owned[2](x)
    dropped = (y == 0).flatten(2).all(2)
    assert torch.equal(y, torch.where(dropped[..., None, None], 0.0, x * (65536 / round(0.8 * 65536))))


def test_evaluation_and_the_extremes() -> None:
    context = BatchContext(CPU, seed=1)
    x = torch.randn(4, 3)
    assert RowDropout(0.5, context, 0).eval()(x) is x
    assert RowDropout(0.0, context, 0)(x) is x
    assert torch.equal(RowDropout(1.0, context, 0)(x), torch.zeros(4, 3))
    assert isinstance(replace_dropout(nn.Dropout(0.1), context), RowDropout)


def test_a_guess_about_the_rows_is_said() -> None:
    context = BatchContext(CPU, seed=1)
    layer = RowDropout(0.5, context, 0, name="drop")
    context.begin_part(0, 4, replicated=False)
    layer(torch.ones(4, 6))
    layer(torch.ones(7, 4, 6))
    assert not context.doubts
    layer(torch.ones(8, 6))
    assert "dropout 'drop' gets (8, 6) for 4 rows" in context.doubts["dropout 'drop'"]
