"""Noise of one's own, by row of the global batch: the same for any split, well distributed, and recomputable."""

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.events.read import read_events
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import RowDropout
from instep.parallel.noise_patches import noise_by_row
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "rand": lambda x: torch.rand(*x.shape, dtype=x.dtype),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x: torch.randint(0, 9, (len(x), 1)).to(x.dtype),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 2.0),
    "distribution": lambda x: torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x)).rsample(),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 0.5),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x[..., None].expand(-1, -1, 4), 0.5).sum(-1),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x[:, None]] * 3, dropout_p=0.4)[:, 0]
        + F.scaled_dot_product_attention(*[x.reshape(-1, 1, 2, 4)] * 3, dropout_p=0.4, is_causal=True).reshape(x.shape)
    ),
    "shared": lambda x: torch.randn(x.shape[1:], dtype=x.dtype).expand_as(x),
    "own": lambda x: instep.randn_like(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_any_split_gives_the_same(name: str) -> None:
    """The rows of a batch of 12 in one part, and in three of other sizes: the same noise, twice in a row another."""
    context = BatchContext(torch.device("cpu"), seed=5)
    x = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).reshape(12, 8)

    def draw(step: int, first: int, last: int) -> list[torch.Tensor]:
        context.begin_step(step)
        context.begin_part(first, last - first, replicated=False)
        return [DRAWS[name](x[first:last]) for _ in range(2)]

    with noise_by_row(context, compiles=False):
        whole = draw(3, 0, 12)
        parts = [draw(3, first, last) for first, last in ((0, 5), (5, 6), (6, 12))]
        later = draw(4, 0, 12)
    for number in range(2):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], later[0])


def test_a_second_pass_over_the_parts_draws_noise_of_its_own() -> None:
    """A GAN's generator must not see the critic's noise again; dropout layers neither."""
    context = BatchContext(torch.device("cpu"), seed=5)
    layer, ones = RowDropout(0.5, context, 0), torch.ones(12, 8)
    context.begin_step(3)
    with noise_by_row(context, compiles=False):
        for draw in (lambda: torch.randn(12, 8), lambda: layer(ones)):
            drawn = []
            for passes in (0, 1, 0):
                context.begin_part(0, 12, replicated=False, passes=passes)
                drawn.append(draw())
            assert torch.equal(drawn[0], drawn[2])
            assert not torch.equal(drawn[0], drawn[1])


def test_outside_of_a_part_it_is_torchs() -> None:
    context = BatchContext(torch.device("cpu"), seed=5)
    torch.manual_seed(1)
    expected = torch.randn(4), torch.rand_like(torch.zeros(3)), torch.empty(2).normal_()
    with noise_by_row(context, compiles=False):
        torch.manual_seed(1)
        assert torch.equal(torch.randn(4), expected[0])
        assert torch.equal(torch.rand_like(torch.zeros(3)), expected[1])
        assert torch.equal(torch.empty(2).normal_(), expected[2])
        context.begin_part(0, 4, replicated=False)
        generator = torch.Generator().manual_seed(1)
        assert torch.equal(torch.randn(4, generator=generator), expected[0])
        assert not torch.equal(torch.randn(4), torch.randn(4, generator=generator.manual_seed(1)))
    assert torch.randn.__module__ != "instep.parallel.row_noise"


CALLS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.rand(4, 2),
    lambda: torch.rand((4, 2)),
    lambda: torch.rand([4, 2], dtype=torch.float64),
    lambda: torch.randn(size=(4, 2)),
    lambda: torch.randn(torch.Size([4, 2]), device="cpu", requires_grad=True),
    lambda: torch.randint(9, (4, 2)),
    lambda: torch.randint(2, 9, (4, 2)),
    lambda: torch.randint(9, size=(4, 2)),
    lambda: torch.randint(high=9, size=(4, 2)),
    lambda: torch.randint(low=2, high=9, size=(4, 2), dtype=torch.int32),
    lambda: torch.randint_like(torch.zeros(4, 2), 9),
    lambda: torch.randint_like(torch.zeros(4, 2), 2, 9),
    lambda: torch.normal(0.0, 1.0, (4, 2)),
    lambda: torch.normal(mean=0.0, std=1.0, size=(4, 2)),
    lambda: torch.normal(torch.zeros(4, 2), torch.ones(2)),
    lambda: torch.normal(torch.zeros(4, 2)),
    lambda: torch.bernoulli(torch.full((4, 2), 0.5)),
    lambda: torch.bernoulli(torch.zeros(4, 2), 0.5),
    lambda: torch.bernoulli(input=torch.full((4, 2), 0.5)),
    lambda: torch.rand_like(torch.zeros(4, 2), dtype=torch.float64),
    lambda: torch.empty(4, 2).uniform_(),
    lambda: torch.empty(4, 2).uniform_(to=3.0),
    lambda: torch.empty(4, 2).uniform_(2, to=3.0),
    lambda: torch.rand(numpy.int64(4), 2),
    lambda: torch.rand(4, 2, pin_memory=False, layout=torch.strided),
    lambda: torch.empty(4, 2).normal_(std=2.0),
    lambda: torch.empty(4, 2).exponential_(lambd=2.0),
    lambda: torch.zeros(4, 2).bernoulli_(),
    lambda: torch.zeros(4, 2).bernoulli_(torch.full((4, 2), 0.5)),
    lambda: torch.zeros(4, 2).bernoulli(0.5),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_every_way_to_call(number: int) -> None:
    """In a part and outside, with the dtype and shape that torch gives."""
    context = BatchContext(torch.device("cpu"), seed=5)
    torch.manual_seed(3)
    expected = CALLS[number]()
    with noise_by_row(context, compiles=False):
        torch.manual_seed(3)
        outside = CALLS[number]()
        context.begin_part(0, 4, replicated=False)
        within = CALLS[number]()
    assert torch.equal(outside, expected)
    for actual in (outside, within):
        assert (actual.dtype, actual.shape, actual.requires_grad) == (expected.dtype, (4, 2), expected.requires_grad)


def within(context: BatchContext, rows: int = 4) -> None:
    context.begin_step(1)
    context.begin_part(0, rows, replicated=False)


def test_gradients_are_torchs() -> None:
    """Of a draw none flows back to mean and deviation; a tensor that is filled forgets where it came from."""
    context = BatchContext(torch.device("cpu"), seed=5)
    with noise_by_row(context, compiles=False):
        within(context)
        mean, std = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        torch.normal(mean, std).sum().backward()
        assert mean.grad is not None
        assert std.grad is not None
        assert [*mean.grad.tolist(), *std.grad.tolist()] == [0.0] * 8
        x = torch.ones(4, requires_grad=True)
        (x.clone().normal_() + 2 * x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 4
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            torch.ones(4, requires_grad=True).uniform_()


def test_rows_that_may_look_at_nothing_get_zero() -> None:
    context = BatchContext(torch.device("cpu"), seed=5)
    query = torch.randn(4, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3, [True] * 3])
    with noise_by_row(context, compiles=False):
        within(context)
        out = F.scaled_dot_product_attention(query, query, query, mask, dropout_p=0.1)
        out.sum().backward()
    assert torch.equal(out[:, :, 0], torch.zeros(4, 1, 2, dtype=torch.float64))
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_vmap_and_pickle_are_torchs() -> None:
    context = BatchContext(torch.device("cpu"), seed=5)
    with noise_by_row(context, compiles=False):
        within(context)
        drawn = torch.vmap(lambda x: x + torch.randn_like(x), randomness="different")(torch.zeros(3, 4))
        assert not torch.equal(drawn[0], drawn[1])
        names = [(torch, "randn"), (torch, "randint"), (F, "dropout"), (torch.Tensor, "uniform_")]
        pickled = [pickle.dumps(getattr(owner, name)) for owner, name in names]
        assert [pickle.loads(data) for data in pickled] == [getattr(owner, name) for owner, name in names]
    assert [pickle.loads(data) for data in pickled] == [getattr(owner, name) for owner, name in names]


@pytest.mark.parametrize("masked", ["", "causal", "bools", "numbers"])
def test_attention_without_its_dropout_is_torchs(masked: str) -> None:
    """With so small a probability that no element is dropped."""
    context = BatchContext(torch.device("cpu"), seed=5)
    query, key, value = torch.randn(3, 4, 2, 5, 6, dtype=torch.float64).unbind()
    mask = {"bools": torch.ones(5, 5).tril().bool(), "numbers": torch.randn(5, 5, dtype=torch.float64)}.get(masked)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": masked == "causal", "scale": 0.3}
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    with noise_by_row(context, compiles=False):
        context.begin_part(0, 4, replicated=False)
        actual = F.scaled_dot_product_attention(query, key, value, dropout_p=1e-9, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # it scales by 1 / (1 - 1/65536)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distributions(dtype: torch.dtype) -> None:
    """Moments, and the largest distance between the distribution functions (Kolmogorov and Smirnov)."""
    context, count = BatchContext(torch.device("cpu"), seed=7), 200_000
    context.begin_step(1)
    context.begin_part(0, 200, replicated=False)
    with noise_by_row(context, compiles=False):
        uniform, normal = torch.rand(200, 1000, dtype=dtype), torch.randn(200, 1000, dtype=dtype)
        exponential = torch.empty(200, 1000, dtype=dtype).exponential_()
        kept = torch.bernoulli(torch.full((200, 1000), 0.3, dtype=dtype))
        whole = torch.randint(-2, 5, (200, 1000))
    bound = 1.95 / math.sqrt(count) + (0.005 if dtype == torch.bfloat16 else 0)  # exceeded by one in a thousand
    for sample, distribution in (
        (uniform, lambda x: x),
        (normal, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        (exponential, lambda x: 1 - torch.exp(-x)),
    ):
        ordered = distribution(sample.double().flatten().sort().values)
        steps = torch.arange(1, count + 1, dtype=torch.float64) / count
        assert (ordered - steps).abs().max() < bound
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert normal.isfinite().all()
    assert abs(kept.double().mean() - 0.3) < 4 * math.sqrt(0.21 / count)
    assert whole.unique().tolist() == list(range(-2, 5))
    lines = normal.double().T.corrcoef() - torch.eye(1000)  # of 200 rows each
    assert lines.abs().max() < 6 / math.sqrt(200)


class Drawing(nn.Module):
    """A small VAE's middle, with dropout by the function, and a part that is computed again in backward."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 16), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.first(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * scale.exp()
        if not self.recomputes:
            return self.last(self.body(z))
        return self.last(checkpoint(self.body, z, use_reentrant=self.recomputes == "reentrant"))

    def body(self, z: torch.Tensor) -> torch.Tensor:
        z = F.dropout(self.drop(torch.tanh(self.middle(z))), 0.3, self.training)
        return self.drop(z + 0.1 * torch.rand(z.shape, dtype=z.dtype))


@dataclass(kw_only=True)
class Noisy(Small):
    recomputes: str = ""
    draws: str = ""

    def model(self) -> nn.Module:
        return Drawing(self.recomputes).double()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        weights = torch.rand(len(x), dtype=x.dtype)
        if self.draws:
            weights = weights + torch.multinomial(torch.ones(len(x), 4), 1)[:, 0]  # the line
            weights = weights + numpy.random.rand()
        torch.rand(2, out=torch.empty(2))
        weights = weights + torch.empty(len(x), dtype=x.dtype).normal_(0.0, 0.01)
        return (
            F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, dtype=x.dtype)), y, reduction="none") * weights
        ).mean()


def train(world: World, folder: str, tasks: dict[str, Noisy], options: dict[str, Any]) -> None:
    for name, task in tasks.items():
        spec = instep.TrainSpec(epochs=2, batch_size=12, quiet=True, data_workers=0, **options)
        worker_main(world, task, spec, RunDirectory(Path(folder) / f"{name}-{world.world_size}"))


def test_training_is_that_of_one_process(tmp_path: Path) -> None:
    """Also where a part is computed again in backward, by torch or by instep: the weights are those without."""
    tasks = {name or "plain": Noisy(recomputes=name) for name in ("", "reentrant", "not reentrant")}
    for size in (1, 2, 3):
        run_ranks(train, size, str(tmp_path), tasks, {})
    alone = load_weights(tmp_path / "plain-1")
    for name in tasks:
        for size in (1, 2, 3):
            weights = load_weights(tmp_path / f"{name}-{size}")
            torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-11)
    notices = [event.get("text", "") for event in read_events(tmp_path / "plain-2")]
    assert [text for text in notices if "random numbers" in text and "(rand)" not in text] == []


def test_what_is_not_owned_is_named(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), {"draws": Noisy(draws="multinomial")}, {})
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the line"))
    notices = [event.get("text", "") for event in read_events(tmp_path / "draws-2")]
    assert any(f"test_row_noise.py:{line} loss draws random numbers (multinomial)" in text for text in notices), notices
    assert any("draws from numpy.random" in text for text in notices)
