"""Which candidate to use, and what to try: pure."""

from __future__ import annotations

import random

import pytest

from instep.core.errors import SpecError
from instep.tune.finders.batch_size import Limits, sizes_to_time
from instep.tune.finders.candidates import doublings, read_list, read_range
from instep.tune.finders.choice import Choice, fastest_of, smallest_within
from instep.tune.finders.noise_scale import NoiseScale


def test_the_fastest_if_it_is_clear() -> None:
    rates = {1: [100, 101, 99, 100], 2: [150, 149, 151, 150], 4: [140, 141, 139, 140]}
    assert fastest_of(rates) == Choice(2, 2, is_clear=True)


def test_the_smallest_of_those_that_cannot_be_told_apart() -> None:
    rates = {1: [100, 140, 90, 130], 2: [120, 100, 125, 135], 4: [10, 11, 10, 9]}
    assert fastest_of(rates) == Choice(1, 2, is_clear=False)


def test_a_slow_round_affects_all_and_so_none() -> None:
    speed = random.Random(0)
    slow = [speed.uniform(0.3, 1.0) for _ in range(6)]
    rates = {1: [100 * s for s in slow], 2: [110 * s * speed.uniform(0.99, 1.01) for s in slow]}
    assert fastest_of(rates).is_clear


def test_one_round_tells_nothing() -> None:
    assert fastest_of({1: [10.0], 2: [20.0]}) == Choice(1, 2, is_clear=False)


def test_the_smallest_within_five_percent() -> None:
    assert smallest_within({8: [50.0], 16: [96.0], 32: [100.0], 64: [99.0]}, 0.05) == 16


def test_the_least_of_three_limits() -> None:
    noise = NoiseScale(100.7, 80, 130, 1, 100, 32)
    assert Limits(64, 256, noise).choose(1) == (64, "fits")
    assert Limits(512, 48, noise).choose(1) == (48, "fast")
    assert Limits(512, 256, noise).choose(8) == (96, "critical")
    assert Limits(512, 256, None).choose(1) == (256, "fast")
    assert Limits(64, 64, None).choose(1) == (64, "fast")
    assert Limits(512, 256, NoiseScale(0.2, 0, 1, 1, 1, 32)).choose(4) == (4, "critical")


def test_what_is_timed() -> None:
    assert sizes_to_time(1, 1437) == [44, 89, 179, 359, 718, 1437]
    assert sizes_to_time(1, 5) == [2, 5]
    assert sizes_to_time(1, 1) == [1]
    assert sizes_to_time(100, 300) == [150, 300]


def test_candidates() -> None:
    assert doublings(0, 4) == (0, 1, 2, 4)
    assert doublings(1, 6) == (1, 2, 4, 6)
    assert doublings(1, 1) == (1,)
    assert read_list("4,1,2", 1, "threads") == (1, 2, 4)
    assert read_range("", 1, 2, "rates") == (1, 2)
    assert read_range("1e-5..0.1", 1, 2, "rates") == (1e-5, 0.1)


@pytest.mark.parametrize("text", ["1", "a..b", "1..", "2..1", "0..1", "1..1", "1..inf", "-1..1", "1..nan"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(SpecError, match=f"over='{text}'"):
        read_range(text, 1, 2, "rates")


@pytest.mark.parametrize("text", ["1", "a,b", "1,,2", "0,1", "2,2", "1.5,2"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(SpecError, match=f"over='{text}'"):
        read_list(text, 1, "threads")
