"""Which steps and ranks are profiled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.profile_window import ProfileWindow, check_ranks, choose_ranks
from instep.core.spec import TrainSpec


@pytest.mark.parametrize(
    ("text", "window"),
    [("20:25", ProfileWindow(20, 24)), ("20", ProfileWindow(20, 20)), ("1:2", ProfileWindow(1, 1)), ("auto", None)],
)
def test_steps_are_read_as_slices(text: str, window: ProfileWindow | None) -> None:
    assert ProfileWindow.parse(text) == window


@pytest.mark.parametrize("text", ["", "5:5", "5:4", "0:3", "0", "a", "1:2:3", "-1", "3:", ":3", "1,2"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="profile="):
        TrainSpec(profile=text)


def test_ranks_need_a_profile_and_must_exist() -> None:
    with pytest.raises(SpecError, match=r"Add --profile"):
        LaunchSpec(profile_ranks="0,1")
    with pytest.raises(SpecError, match="names no ranks"):
        LaunchSpec(profile="auto", profile_ranks="0-3")
    with pytest.raises(SpecError, match="names rank 3"):
        TrainSpec(profile="auto", profile_ranks="0,3").check_world(2)
    check_ranks("0,3", 4)
    check_ranks("all", 1)


@given(st.integers(0, 50), st.integers(1, 60))
def test_the_default_lies_in_what_is_left_and_leaves_a_step_for_memory(step: int, more: int) -> None:
    window = ProfileWindow.plan("auto", step, step + more)
    assert window is not None
    assert step < window.first <= window.last <= step + more
    assert window.last - window.first + 1 == min(5, max(1, more - 1))
    assert more == 1 or window.last < step + more
    if more >= 15:
        assert window == ProfileWindow(step + 10, step + 14)
    assert ProfileWindow.plan("auto", step, None) == ProfileWindow(step + 10, step + 14)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 40), st.integers(1, 60))
def test_named_steps_are_profiled_as_far_as_they_are_made(first: int, count: int, step: int, num_steps: int) -> None:
    window = ProfileWindow.plan(f"{first}:{first + count}", step, num_steps)
    made = [number for number in range(first, first + count) if number > step]
    if not made or first > num_steps:
        assert window is None
    else:
        assert window == ProfileWindow(made[0], made[-1])


@pytest.mark.parametrize(
    ("text", "own_s", "ranks"),
    [
        ("auto", [1.0], [0]),
        ("auto", [1.0, 1.05, 1.0], [0]),
        ("auto", [1.0, 1.0, 2.0], [0, 2]),
        ("auto", [2.0, 1.0, 1.0], [0]),
        ("all", [1.0, 1.0], [0, 1]),
        ("1,0,1", [1.0, 1.0], [0, 1]),
    ],
)
def test_the_slowest_rank_is_profiled_if_it_is_slow(text: str, own_s: list[float], ranks: list[int]) -> None:
    assert choose_ranks(text, own_s) == ranks
