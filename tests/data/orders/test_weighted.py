"""Weights: the law of what is drawn, classes equally often, any position alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.order import Order
from instep.data.orders.weighted import BalancedOrder, WeightedOnceOrder, WeightedOrder

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=40).filter(any)


def epoch_of(order: Order, epoch: int = 0) -> np.ndarray:
    return order.indices(epoch, np.arange(order.num_samples))


@settings(deadline=None)
@given(weights, st.integers(1, 100), st.integers(0, 5))
def test_samples_without_weight_never_come(given_weights: list[float], count: int, epoch: int) -> None:
    array = np.array(given_weights)
    assert (array[epoch_of(WeightedOrder(1, array, count), epoch)] > 0).all()
    num_nonzero = np.count_nonzero(array)
    once = epoch_of(WeightedOnceOrder(1, array, min(count, num_nonzero)), epoch)
    assert (array[once] > 0).all()
    assert len(np.unique(once)) == min(count, num_nonzero)


@settings(deadline=None)
@given(weights, st.data())
def test_any_position_can_be_asked_alone(given_weights: list[float], data: st.DataObject) -> None:
    array = np.array(given_weights)
    classes = np.unique(array, return_inverse=True)[1]
    for make in (
        lambda: WeightedOrder(1, array, 50),
        lambda: WeightedOnceOrder(1, array, -(-np.count_nonzero(array) // 2)),
        lambda: BalancedOrder(1, classes, 50),
    ):
        whole = epoch_of(make(), 3)
        positions = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=20))
        assert make().indices(3, positions).tolist() == whole[positions].tolist()


def test_with_replacement_by_weight() -> None:
    shares = np.array([1.0, 2.0, 0.0, 4.0, 0.5, 10.0])
    counts = np.bincount(epoch_of(WeightedOrder(0, shares, 100_000)), minlength=6)
    wanted = shares / shares.sum() * 100_000
    seen = shares > 0
    assert ((counts - wanted)[seen] ** 2 / wanted[seen]).sum() < 20  # 4 degrees of freedom


def test_a_weight_far_below_the_others_is_kept() -> None:
    shares = np.ones(1000)
    shares[::2] = 1e-300
    assert (epoch_of(WeightedOrder(0, shares, 10_000)) % 2 == 1).all()
    assert len(np.unique(epoch_of(WeightedOnceOrder(0, shares, 600)))) == 600


def test_without_replacement_as_if_drawn_one_after_the_other() -> None:
    shares = np.array([1.0, 2.0, 3.0, 4.0])
    wanted = {frozenset(pair): 0.0 for pair in itertools.combinations(range(4), 2)}
    for first, second in itertools.permutations(range(4), 2):
        wanted[frozenset((first, second))] += shares[first] / 10 * shares[second] / (10 - shares[first])
    order, epochs = WeightedOnceOrder(0, shares, 2), 3000
    counts = dict.fromkeys(wanted, 0)
    first_is_heavier = 0
    for epoch in range(epochs):
        pair = epoch_of(order, epoch).tolist()
        counts[frozenset(pair)] += 1
        first_is_heavier += pair[0] > pair[1]
    assert sum((counts[pair] - epochs * p) ** 2 / (epochs * p) for pair, p in wanted.items()) < 25
    assert abs(first_is_heavier / epochs - 0.5) < 0.04, "the heavier ones do not come first"


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 90))
def test_classes_and_their_samples_are_evenly_used(labels: list[int], num_samples: int) -> None:
    classes = np.unique(labels, return_inverse=True)[1]
    order = BalancedOrder(2, classes, num_samples)
    drawn = np.concatenate([epoch_of(order, epoch) for epoch in range(4)])
    of_class = np.bincount(classes[drawn], minlength=classes.max() + 1)
    assert of_class.max() - of_class.min() <= 1
    of_sample = np.bincount(drawn, minlength=len(classes))
    for number in range(classes.max() + 1):
        assert np.ptp(of_sample[classes == number]) <= 1


@pytest.mark.parametrize("kind", [WeightedOrder, BalancedOrder])
def test_repeated_samples_draw_differently(kind: type[WeightedOrder]) -> None:
    draws = kind(0, np.array([0, 1, 1]), 100).draws(4, np.arange(100))
    assert len(np.unique(draws)) == 100
