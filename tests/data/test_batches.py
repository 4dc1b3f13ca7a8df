"""How an epoch is cut into batches and parts: exactly once, whatever does not divide."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchPlan, PartPlan
from instep.data.order import SampleOrder

plans = st.builds(BatchPlan, st.integers(1, 200), st.integers(1, 70), st.integers(1, 9))
worlds = st.integers(1, 17)


def counted_positions(plan: BatchPlan, world_size: int, step: int) -> list[int]:
    """The positions of the epoch that the ranks count in one step, in the order of the ranks."""
    batch = plan.batch(step)
    return [
        batch.first_position + row
        for rank in range(world_size)
        for part in plan.parts(batch.size, world_size, rank)
        if part.counted
        for row in range(part.first_row, part.first_row + part.num_rows)
    ]


@settings(deadline=None)  # others may be using the machine
@given(plans, worlds)
def test_every_sample_is_counted_exactly_once_an_epoch(plan: BatchPlan, world_size: int) -> None:
    epoch = range(3 * plan.num_batches, 4 * plan.num_batches)
    counts = Counter(position for step in epoch for position in counted_positions(plan, world_size, step))
    assert counts == Counter(range(plan.num_samples))
    assert {plan.batch(step).epoch for step in epoch} == {3}


@settings(deadline=None)  # others may be using the machine
@given(plans, worlds, st.integers(0, 10**6))
def test_a_step_counts_the_same_samples_at_any_world_size(plan: BatchPlan, world_size: int, step: int) -> None:
    assert sorted(counted_positions(plan, world_size, step)) == counted_positions(plan, 1, step)


@settings(deadline=None)  # others may be using the machine
@given(plans, worlds, st.data())
def test_shares_are_even_and_nobody_is_idle(plan: BatchPlan, world_size: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, plan.batch_size))
    by_rank = [plan.parts(size, world_size, rank) for rank in range(world_size)]
    assert {len(parts) for parts in by_rank} == {min(plan.accumulate, size)}
    micro_sizes = [part.micro_rows for part in by_rank[0]]
    assert sum(micro_sizes) == size
    assert max(micro_sizes) - min(micro_sizes) <= 1
    for micro in zip(*by_rank, strict=True):
        rows = [part.num_rows for part in micro]
        assert min(rows) >= 1
        if micro[0].replicated:
            assert micro[0].micro_rows < world_size
            assert [part.counted for part in micro] == [True] + [False] * (world_size - 1)
            assert len({(part.first_row, part.num_rows) for part in micro}) == 1
        else:
            assert sum(rows) == micro[0].micro_rows
            assert max(rows) - min(rows) <= 1


def test_an_example_to_read() -> None:
    plan = BatchPlan(num_samples=20, batch_size=8, accumulate=2)
    assert plan.num_batches == 3
    assert [plan.batch(step) for step in range(4)] == [(0, 0, 8), (0, 8, 8), (0, 16, 4), (1, 0, 8)]
    assert plan.parts(8, world_size=3, rank=1) == (PartPlan(1, 1, 4), PartPlan(5, 1, 4))
    assert plan.parts(8, world_size=3, rank=2) == (PartPlan(2, 2, 4), PartPlan(6, 2, 4))
    last = plan.parts(4, world_size=3, rank=1)
    assert last == (PartPlan(0, 2, 2, True, False), PartPlan(2, 2, 2, True, False))


def test_drop_last_leaves_out_the_part_of_a_batch() -> None:
    plan = BatchPlan(20, 8, drop_last=True)
    assert [plan.batch(step) for step in range(3)] == [(0, 0, 8), (0, 8, 8), (1, 0, 8)]


def test_which_samples_a_step_has_does_not_depend_on_the_cut() -> None:
    order, step = SampleOrder(1, 50), 9
    for world_size in (1, 2, 3, 4):
        for accumulate in (1, 3):
            plan = BatchPlan(50, 12, accumulate)
            positions = sorted(counted_positions(plan, world_size, step))
            batch = plan.batch(step)
            assert np.array_equal(
                order.indices(batch.epoch, positions),
                order.indices(1, np.arange(batch.first_position, batch.first_position + batch.size)),
            )


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(DataError, match="0 samples"):
        BatchPlan(0, 8)
    with pytest.raises(DataError, match="0 samples"):
        SampleOrder(0, 0)
    with pytest.raises(DataError, match=r"2\^62"):
        SampleOrder(0, 2**63)
    with pytest.raises(SpecError, match=r"7 samples, fewer than batch_size=8.*no drop_last"):
        BatchPlan(7, 8, drop_last=True)
    with pytest.raises(SpecError, match="batch_size=0"):
        BatchPlan(7, 0)
    with pytest.raises(SpecError, match="accumulate=0"):
        BatchPlan(7, 1, 0)


sharded = st.builds(
    lambda samples, batch, accumulate, shards: BatchPlan(samples, batch, accumulate, shards=min(shards, batch)),
    st.integers(1, 200),
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(1, 20),
)


@settings(deadline=None)
@given(sharded, worlds, st.integers(0, 10**6))
def test_shards_do_not_depend_on_the_world_size(plan: BatchPlan, world_size: int, step: int) -> None:
    size = plan.batch(step).size
    alone = plan.parts(size, 1, 0)
    assert [part for rank in range(world_size) for part in plan.parts(size, world_size, rank)] == list(alone)
    assert [part.shard for part in alone] == list(range(plan.num_shards(size)))
    rows = [row for part in alone for row in range(part.first_row, part.first_row + part.num_rows)]
    assert rows == list(range(size))


def test_shards_are_of_one_size_and_only_the_last_is_smaller() -> None:
    plan = BatchPlan(103, batch_size=50, shards=16)
    assert [part.num_rows for part in plan.parts(50, 1, 0)] == [4] * 12 + [2]
    assert [part.num_rows for part in plan.parts(3, 1, 0)] == [3]
    assert [len(plan.parts(3, 4, rank)) for rank in range(4)] == [0, 0, 0, 1]
    assert plan.smallest_part == 2
    twice = BatchPlan(100, batch_size=20, accumulate=2, shards=3)
    assert [part.num_rows for part in twice.parts(20, 1, 0)] == [4, 4, 2, 4, 4, 2]
