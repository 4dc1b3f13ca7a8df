"""Where a model may be split: found by tracing, named by the Task, or refused with a reason. No processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.core.errors import TaskError
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.dropout import replace_dropout
from instep.parallel.pipeline.layers import find_layers
from instep.parallel.pipeline.ownership import Uses, keep_only, plan_ownership
from instep.parallel.pipeline.profile import LayerProfile, estimate_profile, plan_stages, profile_layers
from pipeline_recipes import LENGTH, VOCABULARY, Conv, Nested, Tied, mlp

TOKENS = Call((torch.randint(0, VOCABULARY, (2, LENGTH)),), {})
ROWS = Call((torch.randn(2, LENGTH),), {})


def context() -> BatchContext:
    return BatchContext(torch.device("cpu"), 0)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x) if x.sum() > 0 else self.a(x)


class Moody(nn.Module):
    """Does another thing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * (2 if self.training else 1))


class Skipping(nn.Module):
    """A value of the beginning is needed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(LENGTH, LENGTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        return self.c(self.b(first)) + first


@pytest.mark.parametrize(
    ("model", "call"),
    [(mlp(), ROWS), (Tied(), TOKENS), (Conv(), ROWS), (Nested(), ROWS)],
    ids=["sequential", "tied", "conv", "nested"],
)
def test_the_pieces_give_what_the_model_gives(model: nn.Module, call: Call) -> None:
    model.eval()
    layers = find_layers(model, None, call, 3)
    whole = model(*call.positional)
    for middle in range(1, len(layers.names)):
        first, second = layers.stage(0, middle), layers.stage(middle, len(layers.names))
        assert torch.equal(second(call, first(call, None)), whole)


def test_inputs_and_buffers_may_be_needed_everywhere() -> None:
    call = Call(TOKENS.positional, {"mask": torch.ones(2, LENGTH)})
    layers = find_layers(Tied(), None, call, 8)
    assert len([name for name in layers.names if name.startswith("blocks")]) >= 7


@pytest.mark.parametrize(
    ("model", "min_layers", "message"),
    [
        (Branching(), 2, "Branching cannot be split into 2 stages: its forward pass cannot be traced .TraceError"),
        (
            Skipping(),
            4,
            "Skipping cannot be split into 4 stages: it can be split into 2 pieces only, where a single value",
        ),
    ],
)
def test_what_cannot_be_cut(model: nn.Module, min_layers: int, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        find_layers(model, None, ROWS, min_layers)
    assert "Define layers(model) in the Task" in str(caught.value)


def test_a_forward_pass_that_depends_on_the_mode() -> None:
    model = Moody()
    with pytest.raises(TaskError, match="do not compute what the model computes"):
        profile_layers(model, find_layers(model, None, ROWS, 2), ROWS, context())


def test_layers_that_leave_something_out() -> None:
    model = mlp()
    assert isinstance(model, nn.Sequential)
    with pytest.raises(TaskError, match="must make up the whole model"):
        profile_layers(model, find_layers(model, lambda m: list(m)[:-1], ROWS, 2), ROWS, context())  # type: ignore[call-overload]


def test_layers_that_are_no_layers() -> None:
    with pytest.raises(TaskError, match="returned a str at position 1"):
        find_layers(mlp(), lambda m: [m, "head"], ROWS, 2)  # type: ignore[list-item]


def test_functions_as_layers_show_what_they_use() -> None:
    model = Tied().eval()

    def named(m: Any) -> list[Any]:
        return [
            lambda x: m.drop(m.embed(x) + m.positions),
            *m.blocks,
            lambda h: m.head(m.drop(m.norm(h))) * m.scale,
        ]

    layers = find_layers(model, named, TOKENS, 2)
    assert id(model.positions) in layers.uses(0).tensors
    assert id(model.drop) in layers.uses(0).modules
    last = layers.uses(len(layers.names) - 1)
    assert {id(model.embed.weight), id(model.norm.bias), id(model.scale)} <= last.tensors
    assert id(model.positions) not in last.tensors
    assert profile_layers(model, layers, TOKENS, context()).sendable[0]


def test_equal_layers_cost_the_same_and_larger_ones_more() -> None:
    wide = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 4))
    call = Call((torch.randn(2, 512),), {})
    costs = profile_layers(wide, find_layers(wide, None, call, 2), call, context()).costs
    assert costs[0] == costs[1] == costs[2] > costs[3]


def test_a_shared_dropout_counts_on_over_the_stages() -> None:
    shared = context()
    model = replace_dropout(Tied(), shared)
    layers = find_layers(model, None, TOKENS, 4)
    profile = profile_layers(model, layers, TOKENS, shared)
    place = next(number for number, layer in enumerate(shared.noisy) if layer is model.drop)
    uses = [row[place] for row in profile.noise_uses]
    assert uses[-1] == 2
    assert uses[len(uses) // 2] == 1
    assert not shared.doubts
    assert model.training


def test_too_few_layers_with_weights() -> None:
    model = nn.Sequential(nn.Linear(LENGTH, 8), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(8, 2))
    layers = find_layers(model, None, ROWS, 4)
    with pytest.raises(
        TaskError, match="has 2 layers with weights that can be on different ranks, and a pipeline of 4 stages"
    ):
        plan_stages(layers, estimate_profile(model, layers), model, 4)


def test_a_value_that_cannot_travel_is_no_place_to_cut() -> None:
    model = nn.Sequential(nn.Linear(LENGTH, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    layers = find_layers(model, None, ROWS, 2)
    profile = LayerProfile([1.0, 1.0, 9.0], [True, False, True], [])
    assert plan_stages(layers, profile, model, 2).bounds == (0, 1, 3)
    profile = LayerProfile([1.0, 1.0, 9.0], [True, True, True], [])
    assert plan_stages(layers, profile, model, 2).bounds == (0, 2, 3)


def test_a_stage_keeps_its_own_under_their_names() -> None:
    model = Tied()
    names = dict(model.named_parameters())
    layers = find_layers(model, None, TOKENS, 2)
    half = next(number for number, name in enumerate(layers.names) if name.startswith("blocks.3"))
    by_rank = []
    for first, last in ((0, half), (half, len(layers.names))):
        by_rank.append(Uses.union(map(layers.uses, range(first, last))))
    owned, shared = plan_ownership(model, by_rank)
    assert shared == {(0, 1): ["embed.weight"]}
    keep_only(model, owned[1])
    held = dict(model.named_parameters())
    assert all(names[name] is p for name, p in held.items())
    assert next(iter(held)) == "embed.weight"
    assert "positions" not in held
    assert "blocks.0.norm.weight" not in held
    assert set(held) < set(names)
    assert "head.weight" in model.state_dict()
