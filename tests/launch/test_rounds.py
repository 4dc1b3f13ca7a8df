"""Who works together, and what follows when a machine is lost, comes or fails: on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.core.errors import EXIT_ENVIRONMENT, EXIT_USER, FailureRecord, SpecError
from instep.core.spec import LaunchSpec
from instep.launch.machines.lead import Word, names_of
from instep.launch.machines.rounds import GRACE_S, MARGIN_S, RoundState, Rules, Sight, environment_failure, next_state
from instep.launch.rendezvous import plan_rules

RULES = Rules(min_nodes=1, max_nodes=3, max_restarts=3, last_call_s=5, endpoint="h1:29500")


def sight(key: int, **more: object) -> Sight:
    return Sight(**{"key": key, "name": f"h{key + 1}", "age_s": 60.0, "ranks": (2 * key, 2 * key + 1)} | more)


def decide(
    state: RoundState, *sights: Sight, rules: Rules = RULES, progress: int | None = 0, now_s: float = 100
) -> RoundState:
    return next_state(state, sights, rules, progress, now_s, 7)


RUNNING = RoundState(number=4, members=(0, 1, 2), running=True)
ALL = (sight(0), sight(1), sight(2))
LOST_PEER = FailureRecord(rank=0, time_ns=1, summary="connection closed by peer", consequence=True, exit_code=3)
ERROR = FailureRecord(rank=3, time_ns=5, summary="KeyError: 17", exit_code=EXIT_USER)


def test_a_round_begins_with_all_or_after_the_last_call() -> None:
    assert decide(RoundState(), *ALL).members == (0, 1, 2)
    waiting = decide(RoundState(), sight(0), sight(1, age_s=2))
    assert (waiting.running, waiting.waiting) == (False, "")
    assert decide(RoundState(), sight(0), sight(1, age_s=5)).members == (0, 1)


def test_too_few_machines_are_waited_for_and_then_named() -> None:
    rules = replace(RULES, min_nodes=3, join_timeout_s=60)
    state = decide(RoundState(since_s=90), sight(0), sight(1), rules=rules)
    assert state.waiting == "waiting for machines at h1:29500: 2 of 3 are here (h1, h2)"
    over = decide(state, sight(0), sight(1), rules=rules, now_s=150)
    assert over.failures[0].summary.startswith("Only 2 of 3 machines came to h1:29500 within 60 s: h1, h2.")
    assert over.failures[0].exit_code == EXIT_ENVIRONMENT


def test_a_quiet_machine_is_lost_after_its_time_and_not_before() -> None:
    assert decide(RUNNING, sight(0), sight(1), sight(2, quiet_s=9.9)) == RUNNING
    ended = decide(RUNNING, sight(0), sight(1), sight(2, quiet_s=10))
    assert (ended.running, ended.in_vain) == (False, 0)
    sentence = "h3 (ranks 4, 5) has not been heard of for 10 s: its machine or its network is down"
    assert ended.why == f"{sentence}. The others go on without it"
    early = decide(ended, sight(0), sight(1), sight(2, quiet_s=11), now_s=100 + MARGIN_S - 0.1)
    assert not early.running
    following = decide(early, sight(0), sight(1), sight(2, quiet_s=12), now_s=100 + MARGIN_S)
    assert (following.number, following.members) == (5, (0, 1))


def test_a_fixed_number_waits_for_the_machine_to_come_back() -> None:
    rules = replace(RULES, min_nodes=3)
    ended = decide(RUNNING, sight(0), sight(1), sight(2, quiet_s=10), rules=rules)
    assert ended.why.startswith("restart 1 of 3 after h3 (ranks 4, 5) has not been heard of")
    waiting = decide(ended, sight(0), sight(1), sight(2, quiet_s=12), rules=rules, now_s=102)
    assert not waiting.running
    assert "2 of 3 are here (h1, h2)" in waiting.waiting
    assert decide(waiting, *ALL, rules=rules, now_s=103).members == (0, 1, 2)


def test_whoever_is_silent_may_be_the_cause() -> None:
    told = (sight(0, failures=(LOST_PEER,)), sight(1, failures=(replace(LOST_PEER, rank=2),)))
    failing = decide(RUNNING, *told, sight(2, quiet_s=4))
    assert failing.running
    later = decide(failing, *told, sight(2, quiet_s=8), now_s=104)
    assert later.running
    assert "h3 (ranks 4, 5)" in decide(later, *told, sight(2, quiet_s=10), now_s=106).why


def test_a_failure_is_told_by_all_before_it_is_judged() -> None:
    told = (sight(0, failures=(LOST_PEER,)), sight(1), sight(2))
    failing = decide(RUNNING, *told)
    assert failing.running
    both = (sight(0, failures=(LOST_PEER,)), sight(1, failures=(ERROR,)), sight(2, failures=(LOST_PEER,)))
    assert decide(failing, *both).why == "restart 1 of 3 after rank 3: KeyError: 17"
    assert not decide(failing, *told, now_s=100 + GRACE_S).running


def test_restarts_that_bring_progress_are_not_counted() -> None:
    state = replace(RUNNING, in_vain=3, reached=10, previous=(ERROR,))
    failed = tuple(sight(key, failures=(ERROR,)) for key in range(3))
    assert decide(state, *failed, progress=10).over
    again = decide(state, *failed, progress=11)
    assert (again.over, again.in_vain, again.reached) == (False, 1, 11)


def test_progress_is_only_asked_for_when_a_round_is_judged() -> None:
    state = replace(RUNNING, members=(0, 1))
    gone = sight(2, quiet_s=99), sight(3, left="interrupted")
    assert decide(state, sight(0), sight(1), *gone, progress=None) == state
    asked = decide(state, sight(0), sight(1, quiet_s=10), progress=None)
    assert (asked.running, asked.is_judged) == (True, True)
    assert decide(asked, sight(0), sight(1), progress=None) == state  # heard of again, just in time
    ended = decide(asked, sight(0), sight(1, quiet_s=10.5), progress=7)
    assert (ended.running, ended.is_judged, ended.reached) == (False, False, 7)


def test_a_machine_that_left_is_lost_at_once() -> None:
    ended = decide(RUNNING, sight(0), sight(1), sight(2, left="interrupted"))
    assert ended.why == "h3 (ranks 4, 5) has left: interrupted. The others go on without it"
    assert decide(ended, sight(0), sight(1), sight(2, left="interrupted")).members == (0, 1)


def test_a_lost_machine_is_no_restart_where_enough_are_left_unless_it_goes_on_so() -> None:
    rules = replace(RULES, max_restarts=0, min_nodes=2)
    left = sight(2, left="ended by SIGTERM")
    ended = decide(RUNNING, sight(0), sight(1), left, rules=rules)
    assert (ended.over, ended.running, ended.in_vain) == (False, False, 0)
    assert decide(RUNNING, sight(0), sight(1, left="interrupted"), left, rules=rules).over  # one is too few
    error = sight(0, failures=(replace(ERROR, rank=0),))
    assert (
        decide(RUNNING, error, sight(1, failures=(LOST_PEER,)), left, rules=rules).failures[0].summary == "KeyError: 17"
    )
    often = replace(RUNNING, lost_in_vain=3)
    assert decide(often, sight(0), sight(1), left, rules=rules).over
    assert not decide(often, sight(0), sight(1), left, rules=rules, progress=1).over
    assert not decide(often, sight(0), sight(1), left, rules=rules, now_s=500).over


def test_a_newcomer_is_taken_in_when_there_is_room() -> None:
    state = replace(RUNNING, members=(0, 1))
    assert decide(state, sight(0), sight(1), sight(2, age_s=1)).running
    ended = decide(state, *ALL)
    assert (ended.running, ended.in_vain, ended.why[:9]) == (False, 0, "h3 joined")
    assert decide(RUNNING, *ALL, sight(3)).running
    assert decide(state, sight(0, done=True), sight(1), sight(2)).running


def test_all_done_is_over_and_a_failure_beside_it_is_final() -> None:
    done = decide(RUNNING, *(replace(each, done=True, left="its work is done") for each in ALL))
    assert (done.over, done.failures) == (True, ())
    mixed = decide(RUNNING, sight(0, done=True), sight(1, done=True), sight(2, failures=(ERROR,)))
    assert (mixed.over, mixed.failures) == (True, (ERROR,))


def test_a_way_that_is_blocked_is_final_unless_a_machine_was_lost() -> None:
    blocked = environment_failure("h1 (10.0.0.1) cannot reach h3 (10.0.0.3) on port 40123: timed out", 3, final=True)
    failing = decide(replace(RUNNING, number=0), sight(0, failures=(blocked,)), sight(1), sight(2))
    over = decide(failing, sight(0, failures=(blocked,)), sight(1), sight(2), now_s=100 + GRACE_S)
    assert (over.over, over.failures) == (True, (blocked,))
    lost = decide(failing, sight(0, failures=(blocked,)), sight(1), sight(2, quiet_s=10))
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


def test_machines_with_one_name_are_told_apart() -> None:
    one = Word(
        count=1, name="node", address="10.0.0.1", board_address="10.0.0.1", port=1, number=0, ranks=[], left="",
        done=False, failures=[],
    )  # fmt: skip
    assert names_of({0: one, 1: replace(one, name="other")}) == {0: "node", 1: "other"}
    assert names_of({0: one, 1: replace(one, address="10.0.0.2")}) == {0: "node at 10.0.0.1", 1: "node at 10.0.0.2"}
    assert names_of({0: one, 1: one}) == {0: "node #0", 1: "node #1"}
