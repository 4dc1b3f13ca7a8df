"""A model that is built on the meta device gets the same values later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from instep.core.errors import TaskError
from instep.parallel.deferred import build_deferred


class Odd(nn.Module):
    """What constructors do: parameters from expressions, ties, buffers, a second initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.positions = nn.Parameter(0.02 * torch.randn(4, 6))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("angles", torch.arange(6) / 7.0)
        self.norm = nn.BatchNorm1d(6)
        self.rnn = nn.LSTM(6, 5)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        nn.init.trunc_normal_(self.embed.weight, std=0.3)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.BatchNorm1d):
            module.weight.data.mul_(0.5).add_(torch.rand(6))


def deep() -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
    for p in model.parameters():
        nn.init.uniform_(p, -0.1, 0.1)
    return model


@pytest.mark.parametrize(
    "build",
    [
        *(Odd, deep, lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: nn.MultiheadAttention(8, 2)),
        *(lambda: Odd().double(), lambda: deep().to(torch.bfloat16)),
    ],
)
def test_the_same_numbers(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    usual = build()
    after = torch.rand(3)
    torch.manual_seed(3)
    deferred = build_deferred(build)
    tensors = dict(deferred.model.named_parameters()) | dict(deferred.model.named_buffers())
    assert all(tensor.is_meta for tensor in tensors.values())
    names = {id(tensor): name for name, tensor in tensors.items()}
    result: dict[str, torch.Tensor] = {}
    deferred.materialize(
        list(tensors.values()), lambda tensor, numbers: result.update({names[id(tensor)]: numbers.clone()})
    )
    wanted = dict(usual.named_parameters()) | dict(usual.named_buffers())
    assert result.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(result[name], tensor), name
    assert torch.equal(torch.rand(3), after)  # what is drawn next is the same, too


def test_only_what_is_needed_is_held() -> None:
    """A tensor that is initialised twice is not there between the two."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(20)))
        for layer in model:
            nn.init.normal_(layer.weight)
        return model

    deferred = build_deferred(build)
    most = 0
    original = deferred._run

    def counting(call: object, real: dict[int, torch.Tensor], is_kept: object) -> None:
        nonlocal most
        original(call, real, is_kept)  # type: ignore[arg-type]
        most = max(most, len(real))

    deferred._run = counting  # type: ignore[method-assign,assignment]
    deferred.materialize(list(deferred.model.parameters()), lambda *_: None)
    assert most == 1


def look_at_numbers() -> nn.Module:
    layer = nn.Linear(2, 2)
    assert float(layer.weight.sum()) < 100
    return layer


def draw_by_name() -> nn.Module:
    layer = nn.Linear(2, 2)
    torch.rand(2, device="cpu")
    return layer


@pytest.mark.parametrize("build", [look_at_numbers, draw_by_name])
def test_what_cannot_be_deferred_says_so(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TaskError, match=r"without its values.*Train without"):
        build_deferred(build)
