"""How many microbatches, and how long stages stand idle: compared with a schedule gone through by hand."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.core.microbatches import (
    Schedule,
    bubble,
    check_microbatches,
    cut,
    scheduled,
    stages_a_rank,
    useful,
)
from instep.core.spec import TrainSpec


def idle_by_hand(num_ranks: int, count: int) -> float:
    """Go through a gpipe schedule turn by turn: forward passes, then backward passes, a turn each."""
    ends: dict[tuple[str, int, int], int] = {}
    for micro in range(count):
        for stage in range(num_ranks):
            before = [ends.get(("f", stage - 1, micro), 0), ends.get(("f", stage, micro - 1), 0)]
            ends["f", stage, micro] = max(before) + 1
    for micro in range(count):
        for stage in reversed(range(num_ranks)):
            own = ends["b", stage, micro - 1] if micro else ends["f", stage, count - 1]
            ends["b", stage, micro] = max(own, ends.get(("b", stage + 1, micro), 0)) + 1
    return 1 - 2 * count / max(ends.values())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_predicted_bubble_is_that_of_a_schedule(num_ranks: int, count: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert bubble(schedule, num_ranks, count) == pytest.approx(idle_by_hand(num_ranks, count))


def test_interleaving_shortens_the_wait() -> None:
    assert bubble("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert bubble("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert stages_a_rank("interleaved") == 2


@given(st.sampled_from(get_args(Schedule)), st.integers(1, 40), st.integers(2, 8))
def test_every_schedule_comes_out_with_a_few_empty_ones(schedule: Schedule, count: int, num_ranks: int) -> None:
    total = scheduled(schedule, count, num_ranks)
    assert total >= count
    assert scheduled(schedule, total, num_ranks) == total
    check_microbatches(schedule, total, num_ranks)
    if schedule == "interleaved":
        assert total % max(1, total // num_ranks) == 0
    if schedule == "1f1b":
        assert total >= num_ranks


@given(st.integers(1, 100), st.one_of(st.none(), st.integers(1, 30)), st.integers(2, 8))
def test_no_microbatch_is_empty(rows: int, asked: int | None, num_ranks: int) -> None:
    count = useful(asked, rows, num_ranks)
    bounds = cut(rows, count)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == rows


def test_numbers_that_do_not_come_out_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"microbatches=3 does not fill a pipeline of 4 stages.*>= 4, or schedule=gpipe"
    ):
        check_microbatches("1f1b", 3, 4)
    with pytest.raises(SpecError, match=r"microbatches=5 cannot be scheduled.*multiple of 2"):
        check_microbatches("interleaved", 5, 2)
    check_microbatches("gpipe", 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 4}, "microbatches=4 is for a pipeline, and there is none"),
        ({"schedule": "gpipe", "strategy": "ddp"}, "schedule=gpipe is for a pipeline"),
        ({"schedule": "2f2b", "strategy": "pipeline"}, "schedule='2f2b' is unknown. Choose one of gpipe, 1f1b"),
        ({"microbatches": 0, "strategy": "pipeline"}, "microbatches=0 is too small"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainSpec(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "pipeline", "exact": True}, "exact mode works with copies and shards of a model"),
        ({"mesh": "pp=2,tp=2"}, "cannot be split further yet. Use pp together with dp, for instance dp=2,pp=2"),
        ({"strategy": "pipeline", "microbatches": 2}, "does not fill a pipeline of 4 stages"),
    ],
)
def test_worlds_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainSpec(**options).check_world(4)  # type: ignore[arg-type]
