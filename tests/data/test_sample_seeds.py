"""Seeds of samples: what a sample draws, whichever samples around it draw."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.global_generators import generators_kept
from instep.data.sample_seeds import SampleSeeds, seed_sample
from loading import Squares, load

DRAWS: list[Callable[[], float]] = [
    lambda: torch.rand(1).item(),
    random.random,
    np.random.rand,
    lambda: random.gauss(0, 1),
    np.random.randn,
    lambda: 0.0,
]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, len(DRAWS) - 1), max_size=3), min_size=1, max_size=60), st.integers(1, 30))
def test_a_sample_draws_what_it_would_draw_alone(draws: list[list[int]], batch_size: int) -> None:
    """Samples draw from any generators, or from none; batches of any size give what each gives alone."""

    def read_one(number: int) -> list[float]:
        return [DRAWS[draw]() for draw in draws[number]]

    expected = []
    with generators_kept():
        for number in range(len(draws)):
            seed_sample(5, 2, number)
            expected.append(read_one(number))
        seeds, actual = SampleSeeds(5), list[Any]()
        for first in range(0, len(draws), batch_size):
            numbers = list(range(first, min(first + batch_size, len(draws))))

            def read(begin_row: Callable[[int], None], numbers: list[int] = numbers) -> list[Any]:
                batch = []
                for row, number in enumerate(numbers):
                    begin_row(row)
                    batch.append(read_one(number))
                return batch

            actual += seeds.read(2, numbers, read)
            random.random(), np.random.randn()  # what others draw in between changes nothing
    assert actual == expected


class Counting(Squares):
    """Counts what is read; some samples draw, from Python's generator, and some fail if they drew too little."""

    def __init__(self, drawing: range) -> None:
        self.drawing, self.reads = drawing, Counter[int]()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return index, random.random() if index in self.drawing else 0.0


@pytest.mark.parametrize("drawing", [range(0), range(23)])
def test_nothing_is_read_twice_if_the_first_samples_tell(drawing: range) -> None:
    dataset = Counting(drawing)
    load(dataset, 0, 5)
    assert set(dataset.reads.values()) == {1}


def test_the_seeds_of_a_batch_cost_little_if_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(np.random, "seed", calls.append)
    load(Counting(range(0)), 0, 5)
    assert len(calls) == 5 + 4, "5 samples of the first batch, then once a batch"


def test_what_is_drawn_and_put_back_is_that_of_the_epoch() -> None:
    """Such a sample cannot be seen to draw; but what it draws depends on nothing that happened before."""
    seeds, seen = SampleSeeds(1), set[tuple[float, float]]()

    def read(begin_row: Callable[[int], None]) -> None:
        for row in range(3):
            begin_row(row)
            states = random.getstate(), np.random.get_state()
            seen.add((random.random(), np.random.randn()))
            random.setstate(states[0])
            np.random.set_state(states[1])

    with generators_kept():
        seeds.read(0, [0, 1, 2], lambda begin: [begin(row) for row in range(3)])
        for first in range(3, 12, 3):
            random.random(), np.random.randn()
            seeds.read(0, [first, first + 1, first + 2], read)
    assert len(seen) == 1


def test_who_only_looks_at_torchs_seed_sees_that_of_the_sample() -> None:
    """Some datasets make a generator of their own from torch.initial_seed(); nothing is drawn from torch's then."""
    seeds, seen = SampleSeeds(1), list[int]()

    def read(begin_row: Callable[[int], None]) -> None:
        for row in range(3):
            begin_row(row)
            seen.append(torch.initial_seed())

    with generators_kept():
        for epoch in range(2):
            for first in (0, 3, 6):
                seeds.read(epoch, [first, first + 1, first + 2], read)
    assert len(set(seen)) == 18


def test_who_fails_because_of_a_draw_fails_alike() -> None:
    seeds = SampleSeeds(1)
    with generators_kept():
        seed_sample(1, 0, 40)
        expected = random.random()
        seeds.read(0, [1, 2], lambda begin: [begin(0), begin(1)])

        def fail(begin_row: Callable[[int], None]) -> None:
            begin_row(0)
            raise ValueError(random.random())

        with pytest.raises(ValueError, match=str(expected)):
            seeds.read(0, [40], fail)
