"""Which nodes work together, and what follows when one is lost, joins, disagrees or fails: no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.core.errors import EXIT_ENVIRONMENT, EXIT_SPEC, EXIT_USER, FailureRecord, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.launch.failures import environment_failure
from instep.launch.membership.clock_offset import Offset
from instep.launch.membership.generations import (
    GRACE_S,
    MARGIN_S,
    LeaderState,
    NodeStatus,
    Rules,
    next_state,
)
from instep.launch.membership.heartbeat import Heartbeat
from instep.launch.membership.rendezvous import plan_rules
from launch_support import node_info

RULES = Rules(min_nodes=1, max_nodes=3, max_restarts=3, last_call_s=5, endpoint="h1:29500")


def node(
    key: int, info: dict[str, object] | None = None, age_s: float = 60, quiet_s: float = 0, **beat: object
) -> NodeStatus:
    heartbeat = Heartbeat(**{"clock": Offset(), "ranks": (2 * key, 2 * key + 1)} | beat)
    name = f"h{key + 1}"
    return NodeStatus(info=node_info(key, **info or {}), name=name, age_s=age_s, quiet_s=quiet_s, heartbeat=heartbeat)


def decide(
    state: LeaderState, *nodes: NodeStatus, rules: Rules = RULES, progress: int | None = 0, now_s: float = 100
) -> LeaderState:
    return next_state(state, nodes, rules, progress, now_s, 7)


RUNNING = LeaderState(generation=4, agreed=(0, 1, 2), members=(0, 1, 2), running=True)
ALL = (node(0), node(1), node(2))
LOST_PEER = FailureRecord(rank=0, time_ns=1, summary="connection closed by peer", consequence=True, exit_code=3)
ERROR = FailureRecord(rank=3, time_ns=5, summary="KeyError: 17", exit_code=EXIT_USER)


def test_a_generation_starts_with_all_or_after_the_last_call() -> None:
    assert decide(LeaderState(), *ALL).members == (0, 1, 2)
    waiting = decide(LeaderState(), node(0), node(1, age_s=2))
    assert (waiting.running, waiting.waiting) == (False, "")
    assert decide(LeaderState(), node(0), node(1, age_s=5)).members == (0, 1)


def test_too_few_nodes_are_waited_for_and_then_named() -> None:
    rules = replace(RULES, min_nodes=3, join_timeout_s=60)
    state = decide(LeaderState(since_s=90), node(0), node(1), rules=rules)
    assert state.waiting == "waiting for nodes at h1:29500: 2 of 3 are here (h1, h2)"
    over = decide(state, node(0), node(1), rules=rules, now_s=150)
    assert over.failures[0].summary.startswith("Only 2 of 3 nodes joined h1:29500 within 60 s: h1, h2.")
    assert over.failures[0].exit_code == EXIT_ENVIRONMENT


def test_a_quiet_node_is_lost_after_its_time_and_not_before() -> None:
    assert decide(RUNNING, node(0), node(1), node(2, quiet_s=9.9)) == RUNNING
    ended = decide(RUNNING, node(0), node(1), node(2, quiet_s=10))
    assert (ended.running, ended.in_vain) == (False, 0)
    sentence = "h3 (ranks 4, 5) has sent no heartbeat for 10 s: the node or its network is down"
    assert ended.why == f"{sentence}. The others continue without it"
    early = decide(ended, node(0), node(1), node(2, quiet_s=11), now_s=100 + MARGIN_S - 0.1)
    assert not early.running
    following = decide(early, node(0), node(1), node(2, quiet_s=12), now_s=100 + MARGIN_S)
    assert (following.generation, following.members) == (5, (0, 1))


def test_a_fixed_number_waits_for_the_node_to_come_back() -> None:
    rules = replace(RULES, min_nodes=3)
    ended = decide(RUNNING, node(0), node(1), node(2, quiet_s=10), rules=rules)
    assert ended.why.startswith("restart 1 of 3 after h3 (ranks 4, 5) has sent no heartbeat")
    waiting = decide(ended, node(0), node(1), node(2, quiet_s=12), rules=rules, now_s=102)
    assert not waiting.running
    assert "2 of 3 are here (h1, h2)" in waiting.waiting
    assert decide(waiting, *ALL, rules=rules, now_s=103).members == (0, 1, 2)


def test_whoever_is_silent_may_be_the_cause() -> None:
    told = (node(0, failures=(LOST_PEER,)), node(1, failures=(replace(LOST_PEER, rank=2),)))
    failing = decide(RUNNING, *told, node(2, quiet_s=4))
    assert failing.running
    later = decide(failing, *told, node(2, quiet_s=8), now_s=104)
    assert later.running
    assert "h3 (ranks 4, 5)" in decide(later, *told, node(2, quiet_s=10), now_s=106).why


def test_a_failure_is_told_by_all_before_it_is_judged() -> None:
    told = (node(0, failures=(LOST_PEER,)), node(1), node(2))
    failing = decide(RUNNING, *told)
    assert failing.running
    both = (node(0, failures=(LOST_PEER,)), node(1, failures=(ERROR,)), node(2, failures=(LOST_PEER,)))
    assert decide(failing, *both).why == "restart 1 of 3 after rank 3: KeyError: 17"
    assert not decide(failing, *told, now_s=100 + GRACE_S).running


def test_restarts_that_bring_progress_are_not_counted() -> None:
    state = replace(RUNNING, in_vain=3, reached=10, previous=(ERROR,))
    failed = tuple(node(key, failures=(ERROR,)) for key in range(3))
    assert decide(state, *failed, progress=10).over
    again = decide(state, *failed, progress=11)
    assert (again.over, again.in_vain, again.reached) == (False, 1, 11)


def test_progress_is_only_asked_for_when_a_generation_is_judged() -> None:
    state = replace(RUNNING, members=(0, 1), agreed=(0, 1))
    gone = node(2, quiet_s=99), node(3, left="interrupted")
    assert decide(state, node(0), node(1), *gone, progress=None) == state
    asked = decide(state, node(0), node(1, quiet_s=10), progress=None)
    assert (asked.running, asked.is_judged) == (True, True)
    assert decide(asked, node(0), node(1), progress=None) == state  # heard of again, just in time
    ended = decide(asked, node(0), node(1, quiet_s=10.5), progress=7)
    assert (ended.running, ended.is_judged, ended.reached) == (False, False, 7)


def test_a_node_that_left_is_lost_at_once() -> None:
    ended = decide(RUNNING, node(0), node(1), node(2, left="interrupted"))
    assert ended.why == "h3 (ranks 4, 5) has left: interrupted. The others continue without it"
    assert decide(ended, node(0), node(1), node(2, left="interrupted")).members == (0, 1)


def test_a_lost_node_is_no_restart_where_enough_are_left_unless_it_goes_on_so() -> None:
    rules = replace(RULES, max_restarts=0, min_nodes=2)
    left = node(2, left="ended by SIGTERM")
    ended = decide(RUNNING, node(0), node(1), left, rules=rules)
    assert (ended.over, ended.running, ended.in_vain) == (False, False, 0)
    assert decide(RUNNING, node(0), node(1, left="interrupted"), left, rules=rules).over  # one is too few
    error = node(0, failures=(replace(ERROR, rank=0),))
    assert (
        decide(RUNNING, error, node(1, failures=(LOST_PEER,)), left, rules=rules).failures[0].summary == "KeyError: 17"
    )
    often = replace(RUNNING, lost_in_vain=3)
    assert decide(often, node(0), node(1), left, rules=rules).over
    assert not decide(often, node(0), node(1), left, rules=rules, progress=1).over
    assert not decide(often, node(0), node(1), left, rules=rules, now_s=500).over


def test_a_newcomer_is_taken_in_when_there_is_room() -> None:
    state = replace(RUNNING, members=(0, 1))
    assert decide(state, node(0), node(1), node(2, age_s=1)).running
    ended = decide(state, *ALL)
    assert (ended.running, ended.in_vain, ended.why[:9]) == (False, 0, "h3 joined")
    assert decide(RUNNING, *ALL, node(3)).running
    assert decide(state, node(0, done=True), node(1), node(2)).running


def test_all_done_is_over_and_a_failure_beside_it_is_final() -> None:
    done = decide(RUNNING, *(node(key, done=True, left="its work is done") for key in range(3)))
    assert (done.over, done.failures) == (True, ())
    mixed = decide(RUNNING, node(0, done=True), node(1, done=True), node(2, failures=(ERROR,)))
    assert (mixed.over, mixed.failures) == (True, (ERROR,))


def test_a_way_that_is_blocked_is_final_unless_a_node_was_lost() -> None:
    blocked = environment_failure("h1 (10.0.0.1) cannot reach h3 (10.0.0.3) on port 40123: timed out", 3, final=True)
    failing = decide(replace(RUNNING, generation=0), node(0, failures=(blocked,)), node(1), node(2))
    over = decide(failing, node(0, failures=(blocked,)), node(1), node(2), now_s=100 + GRACE_S)
    assert (over.over, over.failures) == (True, (blocked,))
    lost = decide(failing, node(0, failures=(blocked,)), node(1), node(2, quiet_s=10))
    assert not lost.over


def test_settings_of_the_rendezvous_are_heeded() -> None:
    spec = LaunchSpec(nnodes="2:4", rdzv_conf="join_timeout=30,last_call_timeout=2", lost_after="20s", max_restarts=1)
    rules = plan_rules(spec)
    assert (rules.min_nodes, rules.max_nodes, rules.max_restarts) == (2, 4, 1)
    assert (rules.join_timeout_s, rules.last_call_s, rules.lost_after_s) == (30, 2, 20)
    with pytest.raises(SpecError, match="last_call_timeout='soon'"):
        plan_rules(LaunchSpec(rdzv_conf="last_call_timeout=soon"))
    with pytest.raises(SpecError, match="lost_after='2s' is not a time of at least 5 s"):
        LaunchSpec(lost_after="2s")


def test_nodes_that_disagree_before_there_are_enough_end_the_job() -> None:
    rules = replace(RULES, min_nodes=2)
    alone = decide(LeaderState(since_s=90), node(0), rules=rules)
    assert alone.agreed == (0,)
    over = decide(alone, node(0), node(1, {"nnodes": "3"}), rules=rules)
    assert (over.over, over.refused) == (True, {})
    assert over.failures[0].exit_code == EXIT_SPEC
    assert over.failures[0].summary.startswith("h1 was started with --nnodes 2, h2 with --nnodes 3")


def test_a_node_that_disagrees_with_a_running_job_is_refused_alone() -> None:
    state = replace(RUNNING, members=(0, 1), agreed=(0, 1))
    refused = decide(state, node(0), node(1), node(2, {"request": {"seed": 1}}))
    assert (refused.running, refused.over, list(refused.refused)) == (True, False, [2])
    assert "seed: 0 on h1 and h2, 1 on h3" in refused.refused[2].summary
    assert decide(refused, node(0), node(1), node(2, {"request": {"seed": 1}})) == refused


def test_a_node_may_take_the_place_of_one_that_is_lost() -> None:
    rules = replace(RULES, max_nodes=2)
    ranked = [node(key, {"node_rank": key}) for key in (0, 1)]
    state = replace(RUNNING, members=(0, 1), agreed=(0, 1))
    twin = node(2, {"node_rank": 1}, age_s=1)
    assert list(decide(state, *ranked, twin, rules=rules).refused) == [2]
    quiet = decide(state, ranked[0], replace(ranked[1], quiet_s=2), twin, rules=rules)
    assert (quiet.agreed, quiet.refused) == ((0, 1), {})  # undecided
    lost = decide(quiet, ranked[0], replace(ranked[1], quiet_s=10), twin, rules=rules)
    assert (lost.agreed, lost.running) == ((0, 2), False)
    again = decide(lost, ranked[0], replace(ranked[1], quiet_s=12), twin, rules=rules, now_s=102)
    assert again.members == (0, 2)
    assert list(decide(again, ranked[0], ranked[1], twin, rules=rules, now_s=103).refused) == [1]  # it comes back


def test_a_generation_waits_for_clocks_and_warns_of_differences() -> None:
    rules = replace(RULES, min_nodes=2, max_nodes=2)
    fresh = node(1, clock=None, age_s=1)
    assert not decide(LeaderState(since_s=90), node(0), fresh, rules=rules).running
    assert decide(LeaderState(since_s=90), node(0), replace(fresh, age_s=10), rules=rules).running
    state = decide(LeaderState(since_s=90), node(0), node(1, age_s=1, clock=Offset(5 * 10**9, 1000)), rules=rules)
    assert state.running
    (warning,) = state.warnings
    assert warning.startswith("The clock of h2 is 5.0 s ahead of that of h1")
    assert (state.peers[1].name, state.peers[1].host) == ("h2", "10.0.0.2")
