"""What a few rows show before the first step: a loss that is no mean, metrics that cannot be evaluated."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import instep
from instep.core.errors import TaskError
from instep.events.read import read_events
from instep.train.trial import kind_of_loss
from tasks import Small

SIZES = st.floats(0.01, 100) | st.floats(-100, -0.01)


def train(task: Any, run_dir: Path, **options: Any) -> instep.Result:
    defaults = {"epochs": 2, "batch_size": 10, "threads": 1, "quiet": True, "run_dir": str(run_dir)}
    return instep.train(task, **defaults | options)


def notices(run_dir: Path) -> list[str]:
    return [event["text"] for event in read_events(run_dir) if event["event"] == "notice"]


def num_steps(run_dir: Path) -> int:
    return sum(event["event"] == "step" for event in read_events(run_dir))


@given(SIZES, SIZES)
def test_kinds(first: float, second: float) -> None:
    total = first + second
    if abs(total) < 1e-3:
        return

    def kind(whole: float, again: float | None = None) -> str:
        return kind_of_loss([(whole, None), (whole if again is None else again, None), (first, None), (second, None)])

    assert kind(total / 2) == "mean"
    assert kind(total) == "sum"
    assert kind(3 * total) == "neither"
    assert kind(total / 2 * 1.02) == "neither"  # a mean over something else, by chance nearly the same
    assert kind(total, total * 1.01) == "unknown"  # it draws noise


@given(st.floats(0.1, 100), st.floats(0.01, 0.1), st.randoms(use_true_random=False))
def test_a_sum_that_draws_noise(half: float, noise: float, rng: Any) -> None:
    def losses(factor: float, noise: float) -> list[tuple[float, None]]:
        values = [2 * half * factor, 2 * half * factor, half, half, *[2 * half * factor, half, half] * 6]
        return [(value * (1 + rng.uniform(-noise, noise)), None) for value in values]

    assert kind_of_loss(losses(1.0, noise)) == "sum"
    assert kind_of_loss(losses(0.5, noise)) == "unknown"  # a mean
    assert kind_of_loss(losses(1.0, 5 * noise + 0.5)) != "mean"


@given(SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_weighted_mean_is_a_mean(first: float, second: float, weight: float, other: float) -> None:
    mean = (first * weight + second * other) / (weight + other)
    losses = [(mean, weight + other)] * 2 + [(first, weight), (second, other)]
    assert kind_of_loss(losses) in ("mean", "unknown")  # unknown where sum and mean are the same


class NoisySum(Small):
    """As the loss of a variational autoencoder is often written."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y, reduction="sum")


def test_a_sum_that_draws_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is the sum of the losses of their halves"):
        train(NoisySum(), tmp_path)


class Summed(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum")


def test_a_summed_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is the sum of the losses of their halves") as caught:
        train(Summed(), tmp_path)
    assert "Return the mean over the samples" in str(caught.value)
    assert num_steps(tmp_path) == 0


class Contrasted(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        out = model(x)
        return F.cross_entropy(out @ out.T, torch.arange(len(x)))


class Regularised(Small):
    calls = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        return super().loss(model, batch) + 3.0


class Noisy(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch) * torch.rand(())


class Alike(Small):
    """All rows look alike: of 4 rows this is log 4, twice the log 2 of its halves."""

    def loss(self, model: Any, batch: Any) -> Any:
        out = model(batch[0])[:, :1] * 0
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def test_a_loss_that_compares_four_rows_is_no_sum(tmp_path: Path) -> None:
    assert train(Alike(num_samples=8), tmp_path, batch_size=4).status == "complete"


def test_a_loss_that_depends_on_the_split_is_named(tmp_path: Path) -> None:
    train(Contrasted(), tmp_path / "contrasted")
    assert any("depends on how a batch is split" in text for text in notices(tmp_path / "contrasted"))
    for task in (Small(), Regularised(), Noisy()):
        train(task, tmp_path / type(task).__name__)
        assert not any("is split" in text for text in notices(tmp_path / type(task).__name__))


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    """Neither in what the Task counts, nor in the generators that the first step draws from."""
    task = Regularised()
    train(task, tmp_path / "one", steps=3, epochs=None, eval_every="never")
    assert task.calls == 3 + -(-23 // 8)  # steps, and chunks of the last evaluation


class Misshapen(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        return {"accuracy": model(x)[:1, 0]}


class Crashing(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        raise ValueError("no such column")


@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        (Misshapen(), {}, "metric 'accuracy' gave 1 value for a batch of 8 samples"),
        (Crashing(), {}, "no such column"),
        (Small(), {"keep_best": "f1"}, "keep_best=f1: there is no such metric. This Task has eval_loss, accuracy"),
    ],
)
def test_metrics_are_tried_before_the_first_step(tmp_path: Path, task: Any, options: Any, text: str) -> None:
    with pytest.raises((TaskError, ValueError), match=text):
        train(task, tmp_path, **options)
    assert num_steps(tmp_path) == 0
