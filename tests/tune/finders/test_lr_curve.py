"""From losses to a learning rate: known curves, noise, and what suggests nothing."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from instep.tune.finders.lr_curve import choose, has_diverged, rates, smooth

LRS = rates(1e-6, 10.0, 141)


def curve(lr: float, steepest: float = 1e-3, blows_at: float = 1.0) -> float:
    """Falls from 2 to 1, fastest at `steepest`, and rises from `blows_at` on."""
    return 1.5 - 0.5 * math.tanh(math.log10(lr / steepest)) + (max(0.0, math.log10(lr / blows_at)) * 6) ** 2


def test_rates_are_geometric() -> None:
    assert LRS[0] == 1e-6
    assert LRS[-1] == pytest.approx(10.0)
    assert {round(b / a, 9) for a, b in itertools.pairwise(LRS)} == {round(LRS[1] / LRS[0], 9)}


@pytest.mark.parametrize("steepest", [1e-4, 1e-3, 1e-2])
def test_the_steepest_descent_of_a_known_curve(steepest: float) -> None:
    choice = choose(LRS, [curve(lr, steepest) for lr in LRS])
    assert choice.steepest == pytest.approx(steepest, rel=0.15)
    assert choice.lr is not None
    assert choice.lr == pytest.approx(min(choice.steepest or 0, choice.tenth or 0), rel=0.05)


def test_noise_moves_it_little() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        choice = choose(LRS, [curve(lr) + noise.gauss(0, 0.05) for lr in LRS])
        assert choice.steepest is not None
        assert abs(math.log10(choice.steepest / 1e-3)) < 0.6


def test_a_shift_of_the_loss_changes_nothing() -> None:
    """A loss may be negative: likelihoods are."""
    losses = [curve(lr) for lr in LRS]
    assert choose(LRS, losses).lr == choose(LRS, [loss - 100 for loss in losses]).lr


def test_a_tenth_of_the_lowest_bounds_a_late_descent() -> None:
    choice = choose(LRS, [curve(lr, steepest=0.3, blows_at=0.6) for lr in LRS])
    assert choice.lr == pytest.approx(choice.tenth, rel=0.05)
    assert choice.reason.startswith("it is a tenth of")


def test_noise_alone_suggests_nothing() -> None:
    suggested = 0
    for seed in range(50):
        noise = random.Random(seed)
        suggested += choose(LRS, [2 + noise.gauss(0, 0.1) for _ in LRS]).lr is not None
    assert suggested <= 3
    assert "did not fall clearly" in choose(LRS, [2.0 for _ in LRS]).reason


def test_a_loss_that_is_soon_not_finite() -> None:
    losses = [2.0, 1.9, math.nan, 1.0]
    choice = choose(LRS[:4], losses)
    assert choice.lr is None
    assert choice.reason.startswith("the loss was finite in 2 steps only")


def test_a_range_that_ends_too_early_is_named() -> None:
    short = [lr for lr in LRS if lr < 3e-3]
    assert "still falling at the end" in choose(short, [curve(lr) for lr in short]).reason


def test_smoothing_does_not_lag() -> None:
    """A straight line stays where it is; a moving average would move it."""
    line = [5 - math.log10(lr) for lr in LRS]
    assert [s.loss for s in smooth(LRS, line)] == pytest.approx(line)


@pytest.mark.parametrize("shift", [0.0, -100.0])
@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_when_a_test_diverges(shift: float, unit: float) -> None:
    noise = random.Random(3)
    falling = [unit * (2 - 0.01 * i + noise.gauss(0, 0.05)) + shift for i in range(80)]
    assert not any(has_diverged(falling[:count]) for count in range(1, 81))
    assert has_diverged([*falling, math.inf])
    assert has_diverged([*falling, math.nan])
    rising = [unit * 2.0 * (1 + i) + shift for i in range(12)]
    assert has_diverged([*falling, *rising])
