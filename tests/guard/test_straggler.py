"""Who holds the others up: the decision alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.guard.straggler import StepTime, StepTimer, StragglerDetector, is_slow

USUAL = StepTime(0.005, 0.050)


@pytest.mark.parametrize(
    ("share", "others", "slow"),
    [
        (StepTime(0.041, 0.050), [USUAL, USUAL], True),
        (StepTime(0.005, 0.050), [USUAL, USUAL], False),
        (StepTime(0.005, 0.068), [USUAL], False),  # less than a third
        (StepTime(0.005, 0.069), [USUAL], True),
        (StepTime(0.0009, 0.0009), [StepTime(0.0004, 0.0004)], False),  # less than a millisecond
        (StepTime(0.020, 0.090, 64), [StepTime(0.005, 0.050, 32)], False),  # twice the rows
        (StepTime(0.020, 0.130, 64), [StepTime(0.005, 0.050, 32)], True),
        (StepTime(0.041, 0.050, 0), [USUAL], True),  # no rows at all, and yet
        (USUAL, [USUAL, StepTime(0.0, 0.001), StepTime(0.0, 0.050)], False),  # one that is fast makes nobody slow
    ],
)
def test_when_a_rank_is_slow(share: StepTime, others: list[StepTime], slow: bool) -> None:
    assert is_slow(share, others) is slow


def test_it_is_named_at_the_third_time_and_again_after_it_recovered() -> None:
    detector, late = StragglerDetector(3), StepTime(0.041, 0.051)
    said = [detector.check(shares) for shares in [[USUAL, USUAL, late]] * 5]
    assert said == [[], [], [said[2][0]], [], []]
    assert said[2][0] == ("rank 2 takes 41 ms a step for data where the others take 5.0; the other ranks wait for it")
    assert detector.check([USUAL] * 3) == []
    assert [len(detector.check([USUAL, USUAL, late])) for _ in range(4)] == [0, 0, 1, 0]


def test_its_phase_is_named() -> None:
    detector = StragglerDetector(2)
    for _ in range(2):
        assert not detector.check([StepTime(0.006, 0.3), USUAL])
    (said,) = detector.check([StepTime(0.006, 0.3), USUAL])
    assert said == (
        "rank 0 takes 300 ms a step for forward and backward where the other takes 50; the other rank waits for it"
    )


times = st.floats(0, 10)
shares = st.builds(StepTime, times, times, st.integers(0, 100))


@given(st.lists(shares, min_size=1, max_size=8))
def test_never_most_of_the_ranks_at_once(each: list[StepTime]) -> None:
    slow = [rank for rank, share in enumerate(each) if is_slow(share, each[:rank] + each[rank + 1 :] or [share])]
    assert len(slow) <= len(each) // 2
    detector = StragglerDetector(len(each))
    said = [text for _ in range(6) for text in detector.check(each)]
    assert len(said) == (len(slow) if len(each) > 1 else 0)


def test_means_begin_anew() -> None:
    pace = StepTimer()
    pace.data_s, pace.compute_s, pace.num_rows, pace.num_steps = 1.0, 3.0, 64, 2
    assert pace.take() == StepTime(0.5, 1.5, 32.0)
    assert pace.take() == StepTime(0.0, 0.0, 0.0)
