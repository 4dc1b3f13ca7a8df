"""The global generators are what they were: whatever was drawn before, in between, and from which of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.data import global_generators as module
from instep.data.global_generators import generators_kept
from loading import Squares, load

DRAWS: list[Callable[[], Any]] = [
    lambda: np.random.randn(),
    lambda: np.random.rand(),
    lambda: np.random.randn(311),
    lambda: np.random.seed(3),
    lambda: np.random.set_state(("MT19937", np.arange(624, dtype=np.uint32), 624, 1, -0.25)),
    lambda: random.random(),
    lambda: random.gauss(0, 1),
    lambda: torch.randn(3),
]
draws = st.lists(st.sampled_from(DRAWS), max_size=5)


def states() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state(legacy=False)
    numbers = numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]
    second = numpy_state["gauss"] if numpy_state["has_gauss"] else None
    return numbers, second, random.getstate(), torch.get_rng_state().tolist()


@pytest.fixture(autouse=True)
def _restored() -> Any:
    before = np.random.get_state(), random.getstate(), torch.get_rng_state()
    yield
    np.random.set_state(before[0])
    random.setstate(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("is_copied", [True, False])
@given(st.integers(0, 1000), draws, draws)
def test_they_are_kept(is_copied: bool, seed: int, before: list[Any], within: list[Any]) -> None:
    np.random.seed(seed)
    for draw in before:
        draw()
    expected = states()
    with pytest.MonkeyPatch.context() as patch:
        if not is_copied:
            patch.setattr(module, "_is_copied", lambda kind: False)
        with generators_kept():
            assert states() == expected
            for draw in within:
                draw()
    assert states() == expected


def test_another_generator_of_numpy_is_kept() -> None:
    plain = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        expected = np.random.get_state(legacy=False)
        with pytest.warns(RuntimeWarning, match="legacy"), generators_kept():
            pass
        assert np.random.get_state(legacy=False) == expected
    finally:
        np.random.set_bit_generator(plain)


def test_the_numbers_of_numpy_are_not_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> None:
        raise AssertionError("slow")

    monkeypatch.setattr(np.random, "get_state", fail)
    monkeypatch.setattr(np.random, "set_state", fail)
    np.random.seed(1)
    load(Squares(), 0, 5)
