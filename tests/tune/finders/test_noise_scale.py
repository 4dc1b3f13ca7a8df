"""The gradient noise scale of gradients whose mean and covariance are known: without bias, and in its interval."""

from __future__ import annotations

import math

import numpy
import pytest

from instep.tune.finders.noise_probe import plan_noise
from instep.tune.finders.noise_scale import Block, NoiseScale, blocks_of, noise_scale

DIM, SMALL, PER_BLOCK = 50, 16, 8
BIG = SMALL * PER_BLOCK
MEAN = numpy.linspace(-0.1, 0.2, DIM)
DEVIATION = numpy.linspace(0.2, 2.0, DIM)
TRUE = float((DEVIATION**2).sum() / (MEAN**2).sum())


def measure(seed: int, num_blocks: int = 32, mean: numpy.ndarray = MEAN) -> NoiseScale:
    generator = numpy.random.default_rng(seed)
    means = generator.normal(mean, DEVIATION / math.sqrt(SMALL), (num_blocks, PER_BLOCK, DIM))
    blocks = [Block(float((m**2).sum(1).mean()), float((m.mean(0) ** 2).sum())) for m in means]
    return noise_scale(blocks, SMALL, BIG)


def test_the_estimates_have_no_bias() -> None:
    estimates = [measure(seed) for seed in range(200)]
    assert numpy.mean([each.signal for each in estimates]) == pytest.approx((MEAN**2).sum(), rel=0.03)
    assert numpy.mean([each.noise for each in estimates]) == pytest.approx((DEVIATION**2).sum(), rel=0.01)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """95 % of the time, less what a bootstrap over 32 blocks loses."""
    hits = sum(each.low <= TRUE <= each.high for each in map(measure, range(300)))
    assert 0.88 * 300 <= hits <= 0.99 * 300


def test_more_blocks_make_it_narrower() -> None:
    few, many = measure(1, 16), measure(1, 1024)
    assert many.high - many.low < (few.high - few.low) / 3
    assert many.critical == pytest.approx(TRUE, rel=0.1)


def test_a_gradient_that_is_all_noise_has_no_upper_limit() -> None:
    estimates = [measure(seed, mean=numpy.zeros(DIM)) for seed in range(20)]
    assert all(math.isinf(each.high) for each in estimates)
    assert any(math.isinf(each.critical) for each in estimates)


def test_blocks_begin_anew_in_each_epoch() -> None:
    """Ten samples in twos and fours: an epoch has five small steps, of which the last fills no block."""
    small = [(0, 1.0), (0, 3.0), (0, 2.0), (0, 2.0), (0, 9.0), (1, 5.0), (1, 7.0), (1, None), (1, 4.0)]
    big = [(0, 1.5), (0, 2.0), (1, 6.0), (1, 3.0)]
    assert blocks_of(small, big, 2) == [Block(5.0, 2.25), Block(4.0, 4.0), Block(37.0, 36.0)]


def test_the_plan_does_not_depend_on_a_few_processes() -> None:
    plans = [plan_noise(1437, data_size) for data_size in (1, 2, 4, 16)]
    assert plans[0] is not None
    assert plans.count(plans[0]) == 4
    assert plan_noise(63, 1) is None
    small = plan_noise(64, 1)
    assert small is not None
    assert small.big <= 64 / 2
