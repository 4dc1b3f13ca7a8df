"""Offsets of clocks, from when ranks entered and left all-gathers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instep.profile.clock import ClockOffset, clock_offsets


@given(
    st.lists(st.integers(-(10**10), 10**10), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 10**6), min_size=8, max_size=8), min_size=1, max_size=5),
)
def test_the_true_offset_is_within_the_doubt(ahead: list[int], delays: list[list[int]]) -> None:
    entered: list[list[int]] = [[] for _ in ahead]
    left: list[list[int]] = [[] for _ in ahead]
    now = 10**18
    for round_ in delays:
        begins = [now + round_[rank] for rank in range(len(ahead))]
        now = max(begins)  # nobody leaves before all have entered
        for rank, offset in enumerate(ahead):
            entered[rank].append(begins[rank] + offset)
            left[rank].append(now + round_[4 + rank] + offset)
        now += 2 * 10**6
    offsets = clock_offsets(entered, left)
    assert offsets[0] == ClockOffset()
    for offset, mine in zip(offsets, ahead, strict=True):
        assert abs(offset.ahead_ns - (mine - ahead[0])) <= offset.doubt_ns + 1
        assert offset.doubt_ns <= 2 * 10**6 + 1  # what it takes to enter and to leave
