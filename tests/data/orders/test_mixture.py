"""Mixtures: the share of each source in every step, its own epochs, any position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.order import SampleOrder
from instep.data.orders import mixture
from instep.data.orders.mixture import MixtureOrder

shares = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=2, max_size=5).filter(any)


def make(weights: Any, sizes: list[int], num_samples: int, batch_size: int, **options: Any) -> MixtureOrder:
    orders = {str(number): SampleOrder(number, size) for number, size in enumerate(sizes)}
    weights_of = weights if callable(weights) else lambda _: np.array([weights])
    spec = BatchSpec(**{"seed": 1, "batch_size": batch_size, **options})
    return MixtureOrder(spec, orders, sizes, weights_of, num_samples)


def rising(steps: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(steps)), steps / 50, 1.0 * (steps > 30)], axis=1)


@settings(deadline=None)
@given(shares, st.integers(1, 20), st.integers(1, 60))
def test_every_batch_and_all_of_them_have_their_shares(weights: list[float], batch_size: int, steps: int) -> None:
    order = make(weights, [50] * len(weights), batch_size * steps, batch_size)
    wanted = np.array(weights) / sum(weights)
    sources = order.indices(0, np.arange(batch_size * steps)).reshape(steps, batch_size) // 50
    for step in range(steps):
        counts = np.bincount(sources[step], minlength=len(weights))
        assert (np.abs(counts - wanted * batch_size) < 1 + 1e-9).all()
        assert (counts[wanted == 0] == 0).all()
        so_far = np.bincount(sources[: step + 1].reshape(-1), minlength=len(weights))
        assert list(order.taken(step + 1).values()) == so_far.tolist()
        assert (np.abs(so_far - wanted * batch_size * (step + 1)) < 6).all()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=3), st.integers(1, 100), st.integers(1, 12), st.booleans())
def test_sources_come_in_their_own_order(sizes: list[int], num_samples: int, batch_size: int, drops: bool) -> None:
    """A source's samples, in the order of steps, are its own epochs one after the other."""
    if drops and num_samples < batch_size:
        return
    order = make(rising, sizes, num_samples, batch_size, drop_last=drops)
    starts = np.cumsum([0, *sizes])
    met: list[list[int]] = [[], [], []]
    for epoch in range(3):
        for first in range(0, order.num_samples, batch_size):
            rows = order.indices(epoch, np.arange(first, min(first + batch_size, order.num_samples)))
            for source in range(3):
                own = rows[(rows >= starts[source]) & (rows < starts[source + 1])] - starts[source]
                met[source].append(sorted(own.tolist()))  # rows of a batch are shuffled
    for source, steps in enumerate(met):
        wanted, place = SampleOrder(source, sizes[source]), 0
        for own in steps:
            positions = np.arange(place, place + len(own))
            epochs = positions // sizes[source]
            expected = [wanted.indices(e, positions[epochs == e] % sizes[source]) for e in np.unique(epochs).tolist()]
            assert own == sorted(np.concatenate([np.arange(0), *expected]).tolist())
            place += len(own)


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], rising])
def test_any_position_can_be_asked_alone(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_CHUNK_STEPS", 16)
    arguments = (weights, [30, 40, 50], 100, 9)
    whole, rng = make(*arguments), np.random.default_rng(0)
    for epoch in (0, 1, 7, 30):
        indices, draws = (fn(epoch, np.arange(100)) for fn in (whole.indices, whole.draws))
        positions = rng.integers(0, 100, 20)
        fresh = make(*arguments)
        assert fresh.draws(epoch, positions).tolist() == draws[positions].tolist()
        assert fresh.indices(epoch, positions).tolist() == indices[positions].tolist()
    assert make(*arguments).taken(371) == whole.taken(371)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(rising, [30, 40, 50], 100, 9).indices(9, np.arange(100))
    monkeypatch.setattr(mixture, "_CHUNK_STEPS", 7)
    assert np.array_equal(make(rising, [30, 40, 50], 100, 9).indices(9, np.arange(100)), expected)


def test_rows_of_a_batch_are_shuffled() -> None:
    order = make([1.0, 1.0], [1000, 1000], 2000, 20)
    first = order.indices(0, np.arange(2000)).reshape(100, 20) < 1000
    assert (first.sum(axis=1) == 10).all()
    assert 35 < first[:, 0].sum() < 65


def test_draws_differ_wherever_a_sample_comes_again() -> None:
    order = make([3.0, 1.0], [4, 50], 400, 8)
    draws = order.draws(0, np.arange(400))
    assert len(np.unique(draws)) == 400
    assert (draws >= 0).all()


def test_a_million_steps_of_ten_sources_stay_within_a_few_samples() -> None:
    weights = np.arange(1.0, 11.0)
    order = make(weights.tolist(), [1000] * 10, 10**9, 256)
    taken = np.array(list(order.taken(10**6).values()))
    assert np.abs(taken - weights / 55 * 256e6).max() < 10


def test_no_batches_by_tokens() -> None:
    with pytest.raises(SpecError, match="batch_tokens=100 needs the length"):
        make([1.0], [10], 10, 5, batch_tokens=100)
