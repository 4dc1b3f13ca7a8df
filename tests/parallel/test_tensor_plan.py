"""Plans: read, refused, found; models whose code cannot take parts; gradients of whole parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from instep.core.errors import NumericsError, SpecError, TaskError
from instep.core.mesh import Mesh
from instep.core.spec import TrainSpec
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.strategy import ModelHints, StepSums
from instep.parallel.tensor.plan import compact, given_plan, model_plan
from instep.parallel.tensor.strategy import Tensor, is_split
from instep.train.engine import Engine
from instep.world.grid import Grid
from instep.world.world import World
from ranks import run_ranks
from tensor_recipes import MODELS, WIDTH, Brought, Case, Transformer, train_case

ATTENTION = ("blocks.*.attention.q_proj", "blocks.*.attention.k_proj", "blocks.*.attention.v_proj")
BY_HEADS = (*((path, "colwise") for path in ATTENTION), ("blocks.*.attention.o_proj", "rowwise"))


class Straight(torch.autograd.Function):
    """The user's own step backward, which knows nothing of parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Stubborn(nn.Module):
    """Code that parts of a tensor do not come through: it writes to one, or takes one where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.third, self.fourth = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.fifth, self.sixth = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(8, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h[:, 0] = 0.0
        h = x + self.second(h)
        h = h + self.fourth(Straight.apply(self.third(self.norm(h))))
        h = h + self.sixth(F.gelu(self.fifth(self.norm(h))))
        return self.rnn(h)[0] @ self.table.weight.T  # a weight that its own module does not use


class Attentive(nn.Module):
    """All that nn.MultiheadAttention can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.separate = nn.MultiheadAttention(WIDTH, 2, bias=False, kdim=7, vdim=9)
        self.biased = nn.MultiheadAttention(WIDTH, 6, kdim=7, vdim=9, batch_first=True)
        self.three_heads = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.more_keys = nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        late = torch.ones(length, length).triu(1).bool()
        padding = torch.arange(length).expand(rows, length) >= length - torch.arange(rows)[:, None]
        by_head = torch.linspace(-1, 1, rows * 4 * length * length, dtype=x.dtype).view(rows * 4, length, length)
        k, v = x[..., :7], x[:, :, 5:14]
        result = [
            self.packed(x, x, x, attn_mask=late, key_padding_mask=padding, need_weights=False)[0],
            self.packed(x, x, x, attn_mask=late, need_weights=False, is_causal=True)[0],
            self.packed(x, x.roll(1, 1), x.roll(1, 1), attn_mask=by_head)[0],
            self.packed(x[0], x[0], x[0], key_padding_mask=padding[0])[0],
            *(y.flatten(-2) for y in self.packed(x, x, x.flip(1), average_attn_weights=False)),
            *self.biased(x, k, v, key_padding_mask=padding),
            *(y for y in self.separate(x.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))),
            self.three_heads(x, x, x)[0],
            self.more_keys(x, x, x)[0],
        ]
        return torch.cat([(y * torch.arange(y.numel()).view_as(y).cos()).flatten() for y in result])


def spread_alone(world: World, kind: type[nn.Module]) -> dict[str, Any]:
    """Spread a model, and compare it with itself before: output, gradients, and those of a copy."""
    torch.manual_seed(1)
    model = kind().double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    grid = Grid.open(world, Mesh(tp=world.world_size))
    strategy = Tensor(grid, BatchContext(world.device, 0))
    model = strategy.spread(model, ModelHints(lambda: Call((x[:2],), {})))
    double = copy.deepcopy(model)
    differences = []
    for each in (model, double):
        each(x).square().sum().backward()
        for p, q in zip(each.parameters(), expected.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            differences.append(float((p.grad.full_tensor() - q.grad).abs().max()))
    kinds = {name: is_split(p) for name, p in model.named_parameters()}
    return {"off": max(differences), "split": kinds, "told": strategy.said[0], "type": type(model(x))}


def test_code_that_cannot_take_parts_gets_whole_tensors() -> None:
    for answer in run_ranks(spread_alone, 2, Stubborn):
        assert answer["off"] < 1e-12
        assert answer["type"] is torch.Tensor
        assert "fifth by columns; sixth by rows" in answer["told"]
        assert "first by columns, joined after each (its parts are refused: __setitem__ writes" in answer["told"]
        assert "third, fourth by columns, joined after each (with parts, " in answer["told"]
        assert all(answer["split"][f"{name}.weight"] for name in ("first", "second", "third", "fourth", "fifth"))
        assert not answer["split"]["rnn.weight_ih_l0"]


OWN_PLANS: dict[str, tuple[tuple[tuple[str, Any], ...], str]] = {
    "a part of a pair": (tuple((path, ColwiseParallel()) for path in ATTENTION[1:2]), "does not run"),
    # torch's styles give each rank a bare part: -1 then makes narrower heads, and nothing fails.
    "bare parts": (
        (*((path, ColwiseParallel()) for path in ATTENTION), ("blocks.*.attention.o_proj", RowwiseParallel())),
        "changes the model's answer: output 0 is off by",
    ),
    "rows of a whole": ((("blocks.*.mlp.down", RowwiseParallel()),), "does not run"),
    "no such path": ((("blocks.*.mlp.norm", "colwise"),), "there is no layer 'blocks.*.mlp.norm' in the model"),
    "no such word": ((("blocks.*.mlp.up", "columnwise"),), "'columnwise' for 'blocks.*.mlp.up' is unknown"),
    "no such way": ((("blocks.*.norm_1", "colwise"),), "blocks.0.norm_1 cannot be colwise: a LayerNorm cannot"),
    "tied badly": ((("embed", "rowwise"), ("head", "rowwise")), "embed and head share a weight"),
    "tied": ((("embed", "colwise"), ("head", "rowwise")), "trained"),
    "rows of a whole, in words": ((("blocks.*.mlp.down", "rowwise"),), "trained"),
    "right": (BY_HEADS, "trained"),
}


def test_attention_of_torchs_own_in_all_its_forms() -> None:
    for answer in run_ranks(spread_alone, 2, Attentive):
        assert answer["off"] < 1e-12
        assert "packed, separate, biased by heads" in answer["told"]
        assert "three_heads whole on every rank (3 heads cannot be shared by tp=2)" in answer["told"]
        assert "more_keys whole on every rank (it attends to more than its keys" in answer["told"]


def refused(world: World, plan: tuple[tuple[str, Any], ...], model: str = "bare") -> str:
    try:
        train_case(world, Case(model, plan=plan), f"tp={world.world_size}")
    except TaskError as error:
        return str(error)
    return "trained"


def refuse_all(world: World) -> dict[str, str]:
    return {name: refused(world, plan) for name, (plan, _) in OWN_PLANS.items()}


def test_a_plan_of_ones_own_is_followed_or_refused() -> None:
    for message in run_ranks(refuse_all, 2):
        for name, (_, words) in OWN_PLANS.items():
            assert words in message[name], name


def test_heads_that_do_not_divide_are_refused_with_their_numbers() -> None:
    for message in run_ranks(refused, 4, BY_HEADS, "six_heads"):
        assert (
            "blocks.0.attention.q_proj by columns, which are cut into heads: 6 × 4, and tp=4 does not divide" in message
        )


def gradients_agree(world: World) -> list[Any]:
    """Reduce gradients that differ between ranks for a parameter that each holds whole, as a kernel may make them."""
    grid = Grid.open(world, Mesh(dp=world.world_size // 2, tp=2))
    strategy = Tensor(grid, BatchContext(world.device, 0))
    model = strategy.spread(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8)), ModelHints())
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.ones_like(p) if is_split(p) else torch.ones_like(p) * (1 + 1e-6 * world.rank)
    sums = list(strategy.reducer(parameters).reduce(StepSums(float(world.rank), 1.0))[:2])
    return [sums, [p.grad.to_local().tolist() for p in parameters if not is_split(p)], p.grad.placements]


@pytest.mark.parametrize("world_size", [2, 4])
def test_whole_parameters_get_the_same_gradient_everywhere(world_size: int) -> None:
    answers = run_ranks(gradients_agree, world_size)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == [sum(range(world_size)), world_size]
    first = 1.0 if world_size == 2 else 2 + 2e-6  # of ranks 0 and 2, one of each group
    assert answers[0][1][-1] == pytest.approx([first] * 8, rel=1e-7)


def told_by(world: World) -> list[str]:
    """What is said to exact mode, and to a loss that is not finite."""
    message = []
    MODELS["broken"] = lambda: nn.Sequential(Transformer(), nn.Threshold(1e9, float("nan")))
    for attempt in (
        lambda: Engine(world, TrainSpec(strategy="tensor", exact=True)),
        lambda: train_case(world, Case("broken"), "tp=2"),
    ):
        try:
            attempt()
        except (SpecError, NumericsError) as error:
            message.append(str(error))
    return message


def test_exact_mode_is_refused_and_a_loss_that_is_not_finite_told() -> None:
    for exact, not_finite in run_ranks(told_by, 2):
        assert "exact mode works with copies and shards of a model (dp, fsdp). tp(2) also splits" in exact
        assert "the loss of step 1 is nan" in not_finite


class TestReading:
    def test_a_path_stands_for_all_blocks(self) -> None:
        plan = given_plan({"blocks.*.mlp.*": "colwise", "head": "colwise_rep"}, Transformer(), "", strict=True)
        assert [path for path, layer in plan.layers.items() if layer.style == "colwise"] == [
            f"blocks.{n}.mlp.{name}" for n in range(2) for name in ("gate", "up", "drop", "down")
        ]
        assert plan.layers["head"].style == "colwise_rep"

    def test_a_plan_that_a_model_brings_is_under_its_base_model(self) -> None:
        result = model_plan(Brought())
        assert result["model.blocks.*.mlp.down"] == "rowwise"
        assert result["lm_head"] == "colwise_rep"
        assert model_plan(Transformer()) == {}

    def test_numbers_are_put_together(self) -> None:
        paths = [f"blocks.{n}.mlp.{m}" for n in range(12) for m in (0, 2)] + ["head", "a.0.b", "a.2.b"]
        assert compact(paths) == ["blocks.0–11.mlp.{0,2}", "head", "a.{0,2}.b"]
