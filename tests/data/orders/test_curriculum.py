"""The order of a curriculum: only the easiest are used, and evenly; any position alone; in the end the plain order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.order import SampleOrder
from instep.data.orders.curriculum import CurriculumOrder, rank_samples
from instep.data.orders.pacing import PACINGS, Pacing


def order_of(
    count: int, batches: BatchSpec, pacing: Pacing, rescore: int = 0, identity: bool = True
) -> CurriculumOrder:
    """Return an order in which a sample's index is its rank, or one with a ranking of its own in each epoch."""
    rankings = {0: np.arange(count)} if identity else {}

    def ranking_of(epoch: int) -> Any:
        key = 0 if identity else epoch // rescore if rescore else 0
        return rankings.setdefault(key, np.random.default_rng(key).permutation(count))

    return CurriculumOrder(batches, count, pacing, ranking_of, rescore)


@st.composite
def curricula(draw: st.DrawFn) -> tuple[int, BatchSpec, Pacing]:
    count = draw(st.integers(1, 60))
    batch_size = draw(st.integers(1, 20))
    batches = BatchSpec(
        seed=draw(st.integers(0, 3)), batch_size=batch_size, drop_last=count >= batch_size and draw(st.booleans())
    )
    duration = draw(st.sampled_from(["steps", "epochs"]))
    pacing = Pacing(
        pacing=draw(st.sampled_from(list(PACINGS))),
        start=draw(st.one_of(st.none(), st.floats(0.01, 1.0))),
        buckets=draw(st.one_of(st.none(), st.integers(2, 40))),
        **{duration: draw(st.integers(1, 40 if duration == "steps" else 5))},
    )
    return count, batches, pacing


def steps_of(order: CurriculumOrder, batches: BatchSpec, num_epochs: int) -> list[np.ndarray]:
    plan = order.plan(batches)
    steps = (plan.batch(step) for step in range(num_epochs * plan.num_batches))
    return [order.indices(b.epoch, np.arange(b.first_position, b.first_position + b.size)) for b in steps]


@settings(deadline=None)
@given(curricula())
def test_only_the_easiest_are_used_and_evenly(curriculum: tuple[int, BatchSpec, Pacing]) -> None:
    count, batches, pacing = curriculum
    order = order_of(count, batches, pacing)
    plan = order.plan(batches)
    levels = pacing.levels(plan.num_batches)
    used, since = np.zeros(count, dtype=int), np.full(count, -1)
    for step, ranks in enumerate(steps_of(order, batches, order.paced_epochs)):
        fraction = next(level.fraction for level in reversed(levels) if level.first_step <= step)
        active = order.num_active(step)
        assert active == max(1, int(np.ceil(fraction * count - 1e-9)))
        assert ranks.max() < active
        since[:active] = np.where(since[:active] < 0, step, since[:active])
        np.add.at(used, ranks, 1)
        for first in set(since.tolist()) - {-1}:  # those that became active together
            together = used[since == first]
            assert together.max() - together.min() <= 2


@settings(deadline=None)
@given(curricula(), st.integers(0, 3))
def test_when_everything_is_in_use_the_order_is_the_plain_one(
    curriculum: tuple[int, BatchSpec, Pacing], epoch: int
) -> None:
    count, batches, pacing = curriculum
    order = order_of(count, batches, pacing)
    steps_per_epoch = order.plan(batches).num_batches
    assert order.paced_epochs == -(-pacing.num_steps(steps_per_epoch) // steps_per_epoch)
    plain = SampleOrder(batches.seed, count).indices(order.paced_epochs + epoch, np.arange(count))
    assert order.indices(order.paced_epochs + epoch, np.arange(count)).tolist() == plain.tolist()
    assert order.draws(order.paced_epochs + epoch, np.arange(count)) is None


@settings(deadline=None)
@given(curricula(), st.integers(0, 3), st.floats(0.05, 0.95), st.data())
def test_any_position_can_be_asked_alone(
    curriculum: tuple[int, BatchSpec, Pacing], rescore: int, end: float, data: st.DataObject
) -> None:
    count, batches, pacing = curriculum
    if data.draw(st.booleans()):
        pacing = Pacing(pacing="root", start=end / 2, end=end, epochs=2)
    epoch = data.draw(st.integers(0, 6))
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    whole = order_of(count, batches, pacing, rescore, identity=False).indices(epoch, np.arange(count))
    alone = order_of(count, batches, pacing, rescore, identity=False)
    assert alone.indices(epoch, positions).tolist() == whole[positions].tolist()
    assert [int(alone.indices(epoch, p)) for p in positions] == whole[positions].tolist()


def test_a_set_that_grows_as_fast_as_it_is_read_gives_every_sample_once() -> None:
    batches = BatchSpec(seed=0, batch_size=10)
    order = order_of(1000, batches, Pacing(start=0.1, steps=50))
    ranks = order.indices(0, np.arange(1000))
    assert np.array_equal(np.sort(ranks), np.arange(1000))
    assert ranks[:30].max() < 200
    assert ranks[:250].mean() < 0.6 * ranks[-250:].mean()


def test_new_samples_come_among_old_ones() -> None:
    batches = BatchSpec(seed=0, batch_size=10)
    order = order_of(1000, batches, Pacing(pacing="steps", buckets=5, epochs=8))
    for level in Pacing(pacing="steps", buckets=5, epochs=8).levels(100)[1:-1]:
        active = order.num_active(level.first_step)
        first = level.first_step * 10 % 1000
        ranks = order.indices(level.first_step // 100, np.arange(first, first + 100))
        share = np.mean(ranks >= active - 200)
        assert 0.5 * 200 / active < share < 0.6


def test_repeats_within_an_epoch_draw_differently() -> None:
    order = order_of(50, BatchSpec(seed=0, batch_size=5), Pacing(start=0.2, epochs=3))
    indices, draws = order.indices(0, np.arange(50)), order.draws(0, np.arange(50))
    assert len(set(indices.tolist())) < 50
    assert draws is not None
    assert len(set(draws.tolist())) == 50


def test_only_the_easiest_for_good() -> None:
    order = order_of(50, BatchSpec(seed=0, batch_size=5), Pacing(start=0.2, end=0.5, epochs=2))
    assert order.uses_ranking_until is None
    epochs = [order.indices(epoch, np.arange(50)) for epoch in (2, 3, 1000)]
    for ranks in epochs:
        assert np.bincount(ranks, minlength=50).tolist() == [2] * 25 + [0] * 25
    assert len({tuple(ranks.tolist()) for ranks in epochs}) == 3


def test_another_ranking_begins_a_pass_of_its_own() -> None:
    batches = BatchSpec(seed=0, batch_size=5)
    pacing = Pacing(start=0.5, end=0.5, epochs=20)
    order = order_of(40, batches, pacing, rescore=2, identity=False)
    assert np.array_equal(np.sort(order.indices(1, np.arange(40))), np.arange(40)), "before the first scores"
    for epoch in range(2, 12):
        ranking = np.random.default_rng(epoch // 2).permutation(40)
        assert sorted(order.indices(epoch, np.arange(40)).tolist()) == sorted([*ranking[:20].tolist()] * 2)


def test_equal_scores_are_drawn_by_the_seed() -> None:
    scores = np.repeat([1.0, 0.0], 50)
    rankings = [rank_samples(seed, scores) for seed in (0, 1)]
    assert all(set(ranking[:50].tolist()) == set(range(50, 100)) for ranking in rankings)
    assert rankings[0].tolist() != rankings[1].tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [
        order_of(100, BatchSpec(seed=seed, batch_size=10), Pacing(start=0.5, epochs=5)).indices(epoch, np.arange(100))
        for seed in (0, 1)
        for epoch in range(7)
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 14


@pytest.mark.parametrize(
    ("pacing", "expected"),
    [
        ("linear", [0.2, 0.4, 0.6, 0.8, 1.0]),
        ("root", [0.2, 0.5292, 0.7211, 0.8718, 1.0]),
        ("exponential", [0.2, 0.2991, 0.4472, 0.6687, 1.0]),
        ("steps", [0.2, 0.4, 0.6, 0.8, 1.0]),
        (lambda progress: 0.5 + progress**2 / 2, [0.5, 0.53125, 0.625, 0.78125, 1.0]),
    ],
)
def test_pacings(pacing: Any, expected: list[float]) -> None:
    levels = Pacing(pacing=pacing, steps=8, buckets=5).levels(3)
    assert [level.first_step for level in levels] == [0, 2, 4, 6, 8]
    assert [level.fraction for level in levels] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 10, "pacing": "square"}, "'linear', 'root', 'exponential', 'steps'"),
        ({"steps": 0}, "steps=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({}, "neither is given"),
        ({"steps": 1, "epochs": 1}, "steps=1 and epochs=1"),
        ({"steps": 1, "start": 0.0}, "start=0.0"),
        ({"steps": 1, "start": 1.5}, "start=1.5"),
        ({"steps": 1, "start": float("nan")}, "start=nan"),
        ({"steps": 1, "end": 0}, "end=0"),
        ({"steps": 1, "start": 0.5, "end": 0.4}, "more than end=0.4"),
        ({"steps": 1, "buckets": 1}, "buckets=1"),
        ({"steps": 1, "pacing": lambda p: p, "start": 0.1}, "Let your function return"),
    ],
)
def test_what_is_not_possible(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Pacing(**options)


def test_a_function_that_returns_no_fraction() -> None:
    with pytest.raises(SpecError, match=r"pacing\(0.0\) returned 0.0"):
        Pacing(pacing=lambda progress: progress, steps=10).levels(5)
