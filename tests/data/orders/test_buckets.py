"""Lengths: every sample once an epoch, in batches of similar lengths, or of so many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.data.batch_plan import BatchPlan, BatchSpec
from instep.data.order import Order
from instep.data.orders.buckets import BucketOrder, TokenOrder

all_lengths = st.lists(st.integers(0, 60), min_size=1, max_size=200)
windows = st.one_of(st.none(), st.integers(1, 100))
LOG_NORMAL = np.random.default_rng(0).lognormal(4, 1, 20_000).astype(np.int64) + 1


def plan_of(order: Order, **options: int) -> BatchPlan:
    return order.plan(BatchSpec(**{"seed": 1, "batch_size": 8, **options}))


def batches(order: Order, plan: BatchPlan, epoch: int = 0) -> list[np.ndarray]:
    cut = []
    for step in range(epoch * plan.num_batches, (epoch + 1) * plan.num_batches):
        batch = plan.batch(step)
        assert batch.epoch == epoch
        cut.append(order.indices(epoch, np.arange(batch.first_position, batch.first_position + batch.size)))
    return cut


def padding(lengths: np.ndarray, cut: list[np.ndarray]) -> float:
    return 1 - lengths.sum() / sum(lengths[batch].max() * len(batch) for batch in cut)


@settings(deadline=None)
@given(all_lengths, st.integers(1, 30), windows, st.integers(0, 5), st.data())
def test_every_sample_once(
    lengths: list[int], batch_size: int, window: int | None, epoch: int, data: st.DataObject
) -> None:
    count = len(lengths)
    whole = BucketOrder(1, np.array(lengths), batch_size, window).indices(epoch, np.arange(count))
    assert sorted(whole.tolist()) == list(range(count))
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    again = BucketOrder(1, np.array(lengths), batch_size, window).indices(epoch, positions)
    assert again.tolist() == whole[positions].tolist()


@settings(deadline=None)
@given(all_lengths, st.integers(60, 500), windows, st.integers(0, 5), st.booleans())
def test_token_batches(lengths: list[int], tokens: int, window: int | None, epoch: int, drop_last: bool) -> None:
    array = np.array(lengths)
    order = TokenOrder(1, array, tokens, window)
    plan = plan_of(order)
    cut = batches(order, plan, epoch)
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(lengths)))
    assert all(array[batch].max() * len(batch) <= tokens for batch in cut)
    sizes = [len(batch) for batch in cut]
    assert plan.batch_size == max(sizes)
    assert plan.smallest_part == min(sizes)
    assert sorted(sizes) == sorted(len(batch) for batch in batches(order, plan, epoch + 1))
    if drop_last and plan.num_batches > 1:
        shorter = plan_of(order, drop_last=True)
        assert plan.num_batches - shorter.num_batches in (0, 1)
        assert len(batches(order, shorter)) == shorter.num_batches


def test_only_the_last_batch_is_not_full() -> None:
    order = BucketOrder(0, LOG_NORMAL[:1003], 10)
    cut = batches(order, plan_of(order, batch_size=10))
    assert [len(batch) for batch in cut] == [10] * 100 + [3]


def test_the_left_over_are_others_in_each_epoch() -> None:
    order = BucketOrder(0, np.arange(103), 10)
    last = [sorted(order.indices(epoch, np.arange(100, 103)).tolist()) for epoch in range(200)]
    counts = np.bincount(np.concatenate(last), minlength=103)
    assert np.count_nonzero(counts) > 95
    assert counts.max() < 20


def test_little_is_padding() -> None:
    order = BucketOrder(0, LOG_NORMAL, 32)
    assert padding(LOG_NORMAL, batches(order, plan_of(order, batch_size=32))) < 0.12
    tokens = TokenOrder(0, LOG_NORMAL, 16_000)
    cut = batches(tokens, plan_of(tokens))
    assert padding(LOG_NORMAL, cut) < 0.10
    assert sum(len(batch) * LOG_NORMAL[batch].max() > 0.8 * 16_000 for batch in cut) > 0.9 * len(cut)
    (sentence,) = tokens.notices()
    assert f"{padding(LOG_NORMAL, cut):.1%} of a batch's tokens" in sentence


@pytest.mark.parametrize("kind", [BucketOrder, TokenOrder])
def test_samples_meet_others_in_every_epoch(kind: type[BucketOrder | TokenOrder]) -> None:
    lengths = np.arange(200) // 5 + 50
    order = kind(0, lengths, 10 if kind is BucketOrder else 900)
    met = [
        frozenset(batch.tolist())
        for epoch in range(20)
        for batch in batches(order, plan_of(order, batch_size=10), epoch)
        if 77 in batch
    ]
    assert len(set(met)) >= 19
    assert len(frozenset().union(*met)) > 30


@pytest.mark.parametrize("kind", [BucketOrder, TokenOrder])
def test_a_window_says_how_many_samples_a_bucket_has(kind: type[BucketOrder | TokenOrder]) -> None:
    lengths = np.full(1000, 10)

    def spread(window: int | None) -> float:
        order = kind(0, lengths, 10 if kind is BucketOrder else 100, window)
        return float(np.mean([np.ptp(batch) for batch in batches(order, plan_of(order, batch_size=10))]))

    assert spread(20) < 25 < 300 < spread(None)


def test_too_few_rows_for_the_ranks() -> None:
    order = TokenOrder(0, np.full(50, 20), 60)
    plan_of(order).check_world(3)
    with pytest.raises(SpecError, match="largest batch has 3 samples, too few for 4 ranks"):
        plan_of(order).check_world(4)
    with pytest.raises(SpecError, match="in 2 shards, too few for 3 ranks"):
        plan_of(order, shards=2).check_world(3)


def test_all_parts_of_a_token_batch_are_computed_once() -> None:
    order = TokenOrder(0, LOG_NORMAL[:500], 2000)
    for options in ({}, {"shards": 4}, {"accumulate": 3}, {"shards": 4, "accumulate": 2}):
        plan = plan_of(order, **options)
        for size in {plan.batch(step).size for step in range(plan.num_batches)}:
            for world_size in (1, 2, 3):
                parts = [part for rank in range(world_size) for part in plan.parts(size, world_size, rank)]
                rows = [row for p in parts if p.counted for row in range(p.first_row, p.first_row + p.num_rows)]
                assert sorted(rows) == list(range(size))


def test_every_token_batch_has_all_its_shards() -> None:
    plan = plan_of(TokenOrder(0, LOG_NORMAL[:500], 2000), shards=4)
    counts = {size: plan.num_shards(size) for size in plan.batches.sizes}
    assert min(counts) < 4 < 16 < max(counts)
    # Shards have one size: 9 rows are 3 + 3 + 3.
    assert all(count == -(-size // -(-size // 4)) for size, count in counts.items())


def test_all_in_one_short_batch() -> None:
    order = TokenOrder(0, np.array([3, 2, 1]), 100)
    assert [plan_of(order).batch(step) for step in (0, 1)] == [(0, 0, 3), (1, 0, 3)]
    with pytest.raises(SpecError, match="drop_last leaves no batch"):
        plan_of(order, drop_last=True)
