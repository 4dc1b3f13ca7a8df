"""Which ranks share a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.world.lane.rendezvous import plan_nodes

LABELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=20)


@given(LABELS)
def test_every_rank_is_once_on_the_node_of_its_label(labels: list[str]) -> None:
    plan = plan_nodes(labels)
    assert sorted(rank for ranks in plan.nodes for rank in ranks) == list(range(len(labels)))
    assert [{labels[rank] for rank in ranks} for ranks in plan.nodes] == [{name} for name in dict.fromkeys(labels)]


@given(LABELS)
def test_ranks_and_nodes_are_in_the_order_of_the_ranks(labels: list[str]) -> None:
    nodes = plan_nodes(labels).nodes
    assert all(list(ranks) == sorted(ranks) for ranks in nodes)
    assert [ranks[0] for ranks in nodes] == sorted(ranks[0] for ranks in nodes)


@given(LABELS)
def test_where_a_rank_is_that_rank_is_found(labels: list[str]) -> None:
    plan = plan_nodes(labels)
    for rank in range(len(labels)):
        node, local_rank = plan.where(rank)
        assert plan.nodes[node][local_rank] == rank


@given(LABELS)
def test_there_are_as_many_inter_node_groups_as_the_smallest_node_has_ranks(labels: list[str]) -> None:
    plan = plan_nodes(labels)
    counts = [labels.count(name) for name in set(labels)]
    assert plan.num_inter_node_groups == min(counts)
    assert (len(plan.nodes) < len(labels)) == any(count > 1 for count in counts)


def test_interleaved_labels() -> None:
    plan = plan_nodes(["b", "a", "b", "c", "a", "b"])
    assert plan.nodes == ((0, 2, 5), (1, 4), (3,))
    assert [plan.where(rank) for rank in range(6)] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    assert plan.num_inter_node_groups == 1


def test_a_rank_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 2 is on no node"):
        plan_nodes(["a", "a"]).where(2)
