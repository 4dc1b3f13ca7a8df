"""Successive halving with promotion: who continues, by the values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.tune.promotion import Promotion, PromotionSpec, read_rung_processes

ENDS = 40
"""Evaluations of a whole training."""


class Search:
    """A search without trainings: the value of evaluation e of trial n is given."""

    def __init__(self, spec: PromotionSpec, worths: list[float]) -> None:
        self.worths, self.promotion = worths, Promotion(spec, is_lowest_best=False)
        self.reported: dict[int, dict[int, float]] = {}
        self.paused: set[int] = set()
        self.complete: list[int] = []
        self.jobs: list[tuple[int, int]] = []

    def train(self, number: int) -> None:
        """Train a trial to its rung."""
        values = self.reported[number]
        allowed = self.promotion.allowed(number)
        self.jobs.append((number, allowed))
        for evaluation in range(len(values) + 1, min(allowed, ENDS) + 1):
            values[evaluation] = self.worths[number]
            self.promotion.reach(number, evaluation, values[evaluation])
        if allowed >= ENDS:
            self.complete.append(number)
        else:
            self.paused.add(number)

    def step(self) -> bool:
        """Train the next trial; return whether there was one."""
        number = self.promotion.promote(self.paused)
        if number is None and len(self.reported) < len(self.worths):
            number = len(self.reported)
            self.reported[number] = {}
            self.promotion.begin(number, {})
        if number is None and not self.complete:
            number = self.promotion.promote_best(self.paused)
        if number is None:
            return False
        self.paused.discard(number)
        self.train(number)
        return True

    def restart(self, spec: PromotionSpec) -> None:
        """Forget everything but the values that were reported, as a process that continues does."""
        self.promotion = Promotion(spec, is_lowest_best=False)
        paused = {n for n, values in self.reported.items() if self.promotion.begin(n, values)}
        assert paused - set(self.complete) == self.paused


SPECS = st.builds(PromotionSpec, eta=st.integers(2, 4), first=st.integers(1, 3), brackets=st.integers(1, 3))
WORTHS = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


@given(SPECS, WORTHS | WORTHS.map(lambda worths: sorted(worths, reverse=True)))
def test_a_search_ends_with_a_winner_and_few_long_trainings(spec: PromotionSpec, worths: list[float]) -> None:
    search = Search(spec, worths)
    while search.step():
        assert len(search.jobs) < 500
    assert search.complete
    assert len(search.reported) == len(worths)
    for bracket in range(spec.brackets):
        members = [n for n in range(len(worths)) if n % spec.brackets == bracket]
        first = spec.first * spec.eta**bracket
        beyond = [n for n in members if len(search.reported[n]) > first]
        if worths == sorted(worths, reverse=True):  # else one may be promoted that later ones beat
            assert len(beyond) <= len(members) // spec.eta + 1  # and the one that had to win
        if len(members) >= spec.eta and first < ENDS:
            assert max(members, key=lambda n: (worths[n], -n)) in {*beyond, *search.complete}


@given(SPECS, WORTHS, st.data())
def test_a_process_that_continues_decides_the_same(
    spec: PromotionSpec, worths: list[float], data: st.DataObject
) -> None:
    straight, disturbed = Search(spec, worths), Search(spec, worths)
    while straight.step():
        disturbed.step()
        if data.draw(st.booleans()):
            disturbed.restart(spec)
    assert not disturbed.step()
    assert disturbed.jobs == straight.jobs


def restored(values: Mapping[int, float]) -> tuple[bool, int]:
    promotion = Promotion(PromotionSpec(eta=3), is_lowest_best=False)
    return promotion.begin(0, values), promotion.allowed(0)


def test_a_trial_that_was_between_two_rungs_continues_to_the_next() -> None:
    assert restored({}) == (False, 1)
    assert restored({1: 0.5}) == (True, 1)
    assert restored({1: 0.5, 2: 0.6}) == (False, 3)
    assert restored({1: 0.5, 2: 0.6, 3: 0.7}) == (True, 3)


def test_less_is_better_and_nan_is_worst() -> None:
    promotion = Promotion(PromotionSpec(eta=2), is_lowest_best=True)
    for number, value in enumerate([math.nan, 0.3, 0.2, 0.4]):
        promotion.begin(number, {1: value})
    paused = {0, 1, 2, 3}
    order = []
    while (number := promotion.promote(paused)) is not None:
        order.append(number)
        paused.discard(number)
    assert order == [2, 1]
    assert promotion.promote_best(paused) == 3


@pytest.mark.parametrize("text", ["asha:eta=1", "asha:first=0", "asha:rungs=3", "asha:eta=x", "asha:eta"])
def test_what_cannot_be(text: str) -> None:
    with pytest.raises(SpecError, match="asha"):
        PromotionSpec.parse(text)


def test_texts() -> None:
    assert PromotionSpec.parse("asha:eta=4,first=2") == PromotionSpec(4, 2, 1)
    assert read_rung_processes("1,2,4") == (1, 2, 4)
    assert read_rung_processes(None) == ()
    with pytest.raises(SpecError, match="rung_processes"):
        read_rung_processes("1,,2")
