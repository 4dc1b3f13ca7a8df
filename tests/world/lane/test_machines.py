"""Which ranks share a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.world.lane.machines import plan_machines

LABELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=20)


@given(LABELS)
def test_every_rank_is_once_on_the_machine_of_its_label(labels: list[str]) -> None:
    plan = plan_machines(labels)
    assert sorted(rank for ranks in plan.machines for rank in ranks) == list(range(len(labels)))
    assert [{labels[rank] for rank in ranks} for ranks in plan.machines] == [{name} for name in dict.fromkeys(labels)]


@given(LABELS)
def test_ranks_and_machines_are_in_the_order_of_the_ranks(labels: list[str]) -> None:
    machines = plan_machines(labels).machines
    assert all(list(ranks) == sorted(ranks) for ranks in machines)
    assert [ranks[0] for ranks in machines] == sorted(ranks[0] for ranks in machines)


@given(LABELS)
def test_where_a_rank_is_that_rank_is_found(labels: list[str]) -> None:
    plan = plan_machines(labels)
    for rank in range(len(labels)):
        machine, place = plan.where(rank)
        assert plan.machines[machine][place] == rank


@given(LABELS)
def test_there_are_as_many_rails_as_the_smallest_machine_has_ranks(labels: list[str]) -> None:
    plan = plan_machines(labels)
    counts = [labels.count(name) for name in set(labels)]
    assert plan.num_rails == min(counts)
    assert plan.shares == any(count > 1 for count in counts)


def test_interleaved_labels() -> None:
    plan = plan_machines(["b", "a", "b", "c", "a", "b"])
    assert plan.machines == ((0, 2, 5), (1, 4), (3,))
    assert [plan.where(rank) for rank in range(6)] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    assert plan.num_rails == 1


def test_a_rank_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 2 is on no machine"):
        plan_machines(["a", "a"]).where(2)
