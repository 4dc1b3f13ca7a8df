"""How many trials run at once: by cores, and by the memory that was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.tune.packing import Packing, Room, TrialLoad, read_parallel


def load(peak_bytes: int = 0, rate: float = 0.0) -> TrialLoad:
    return TrialLoad(1, peak_bytes, rate)


def test_one_alone_until_its_memory_is_known_then_as_many_as_fit() -> None:
    packing = Packing(None, Room(num_trials=4, free_bytes=1000))
    assert packing.limit == 1
    packing.measure([load()])
    assert packing.limit == 1
    packing.measure([load(peak_bytes=300)])
    assert packing.limit == 3
    packing.measure([load(peak_bytes=300), load(peak_bytes=500)])
    assert packing.limit == 1, "a larger trial must be believed"


@given(st.integers(1, 64), st.integers(1, 10**12), st.lists(st.integers(1, 10**12), min_size=1))
def test_never_more_than_cores_and_memory_have_room_for(cores: int, free: int, peaks: list[int]) -> None:
    packing = Packing(None, Room(cores, free))
    for peak in peaks:
        packing.measure([load(peak)])
    assert 1 <= packing.limit <= cores
    assert packing.limit == 1 or packing.limit * max(peaks) <= free


def test_what_it_brings() -> None:
    packing = Packing(2, Room(2, 1000))
    assert packing.limit == 2
    for rate in (99, 100, 101):
        packing.measure([load(rate=rate)])
    for _ in range(3):
        packing.measure([load(rate=80), load(rate=0)])
    assert packing.speedup is None, "the second one has only begun"
    for rate in (89, 90, 90, 90, 91):
        assert packing.speedup is None
        packing.measure([load(rate=80), load(rate=rate)])
    assert packing.speedup == pytest.approx(1.7)


def test_a_load_is_read_from_events() -> None:
    seen = TrialLoad(2)
    seen.take({"event": "memory", "host_bytes": 100, "device_bytes": None})
    seen.take({"event": "phases", "num_steps": 4, "num_samples": 64, "seconds": 8.0, "phases": {"startup": 3.0}})
    assert (seen.peak_bytes, seen.rate) == (200, 0.0), "the start is not a step"
    seen.take({"event": "phases", "num_steps": 4, "num_samples": 64, "seconds": 2.0, "phases": {"forward": 1.0}})
    seen.take({"event": "memory", "host_bytes": 100, "device_bytes": 70})
    assert (seen.peak_bytes, seen.rate) == (200, 64.0)


def test_texts() -> None:
    assert read_parallel("auto") is None
    assert read_parallel("3") == read_parallel(3) == 3
    with pytest.raises(SpecError, match="neither a number of trials nor auto"):
        read_parallel("many")
