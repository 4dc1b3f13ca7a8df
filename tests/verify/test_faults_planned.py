"""The script of a campaign: decided by its seed, every kind in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instep.verify.faults import Kind, Moment, plan_faults


@given(st.integers(0, 2**32), st.integers(0, 200))
def test_the_seed_decides(seed: int, count: int) -> None:
    faults = plan_faults(seed, count)
    assert faults == plan_faults(seed, count)
    assert len(faults) == count
    assert len({fault.kind for fault in faults}) >= min(count, len(Kind))
    assert all(0 <= fault.pick < 1 and fault.delay_s <= 0.8 for fault in faults)


def test_they_come_at_every_moment() -> None:
    met = {(fault.kind, fault.moment) for fault in plan_faults(7, 2000)}
    assert {(Kind.KILL_RANK, moment) for moment in Moment} <= met
    assert plan_faults(7, 50) != plan_faults(8, 50)
