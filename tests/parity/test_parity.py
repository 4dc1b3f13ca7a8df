"""The same answer on 1, 2, 3 and 4 processes: samples, losses, gradients' norms, rates and metrics."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from instep.core.topology import Place
from instep.world.world import World
from ranks import run_ranks
from recipes import CASES, STEPS, Case, train_cases

# test_network_parity.py has 2; test_exact_bits.py and test_strategies.py have 4.
WORLDS = (pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow))
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@functools.cache
def reference() -> dict[Case, dict[str, Any]]:
    """Train everything on one process, once a test session."""
    return train_cases(World.join(Place()), CASES)


@functools.cache
def spread(world_size: int) -> list[dict[Case, dict[str, Any]]]:
    """Train everything on several, once a test session; by rank."""
    return run_ranks(train_cases, world_size, CASES)


def rows_of(by_rank: list[list[list[int]]]) -> list[list[int]]:
    """Put the ranks' parts together; a part that every rank computed whole counts once."""
    rows = []
    for parts in zip(*by_rank, strict=True):
        whole = all(part == parts[0] for part in parts)
        rows.append(list(parts[0]) if whole else [index for part in parts for index in part])
    return rows


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES, ids=str)
class TestSameAnswer:
    def test_losses(self, case: Case, world_size: int) -> None:
        expected, actual = reference()[case], spread(world_size)[0][case]
        assert len(actual["losses"]) == STEPS
        assert actual["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[case.dtype], abs=0)
        assert actual["lrs"] == expected["lrs"]

    def test_samples(self, case: Case, world_size: int) -> None:
        actual = rows_of([by_case[case]["seen"] for by_case in spread(world_size)])
        assert actual == reference()[case]["seen"]

    def test_metrics(self, case: Case, world_size: int) -> None:
        expected, actual = reference()[case]["metrics"], spread(world_size)[0][case]["metrics"]
        assert actual["accuracy"] == expected["accuracy"]
        if case.dtype == "float64":
            # In float32, Adam blows the rounding noise in the gradient of a bias before a BatchNorm up to a full
            # step; training does not see that bias, evaluation by running statistics does.
            assert actual == pytest.approx(expected, rel=TOLERANCE[case.dtype])

    def test_all_ranks_agree(self, case: Case, world_size: int) -> None:
        hashes = {by_case[case]["sha256"] for by_case in spread(world_size)}
        assert len(hashes) == 1

    def test_clipping(self, case: Case, world_size: int) -> None:
        expected, actual = reference()[case]["grad_norms"], spread(world_size)[0][case]["grad_norms"]
        if case.clip_norm is None:
            assert set(actual) == {None}
        else:
            assert actual == pytest.approx(expected, rel=TOLERANCE[case.dtype] * 10, abs=0)
            assert max(actual) > case.clip_norm > min(actual)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_sample_exactly_once_an_epoch(case: Case) -> None:
    order = [index for part in reference()[case]["seen"] for index in part]
    epochs = [order[i : i + case.num_samples] for i in range(0, len(order), case.num_samples)]
    whole = [epoch for epoch in epochs if len(epoch) == case.num_samples]
    assert len(whole) >= 2
    for epoch in whole:
        assert sorted(epoch) == list(range(case.num_samples))
    assert whole[0] != whole[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_fall(case: Case) -> None:
    """A training that does not learn would agree with itself for nothing."""
    losses = reference()[case]["losses"]
    assert sum(losses[-6:]) < 0.97 * sum(losses[:6])
