"""A hang becomes failures, for the restart policy and the user."""

import time
from pathlib import Path

import pytest

from instep.core.errors import RanksFailed
from instep.guard.pulse import Phase, Pulse, begin_pulse
from instep.guard.verdict import Verdict
from instep.launch.failures import describe, order_failures
from instep.launch.logs import LogPlan
from instep.launch.restart import plan_restart
from instep.launch.scratch import open_scratch
from instep.launch.watch import Watch, failures_of

LOGS = LogPlan(Path("/logs"))


def test_the_culprit_comes_first_and_the_sentence_is_said_once():
    verdict = Verdict("rank 1 is stopped (SIGSTOP) in step 4; ranks 0, 2 wait for it in all_reduce of step 4", (1,))
    failed = RanksFailed(order_failures(failures_of(verdict, [0, 1, 2], 7, LOGS)))
    assert failed.first.rank == 1
    assert failed.first.exit_code == 3
    assert [failure.consequence for failure in failed.failures] == [False, True, True]
    assert describe(failed) == f"hung: {verdict.sentence}\nOutput of rank 1: /logs/rank-1.log"
    assert str(failed) == f"hung: {verdict.sentence}"
    assert plan_restart(failed.failures, failed.failures, 1, 3).restart
    assert not plan_restart(failed.failures, (), 0, 0).restart


def test_where_all_wait_somebody_elsewhere_may_be_to_blame():
    failures = failures_of(Verdict("both ranks 0, 1 wait in barrier", ()), [0, 1], 7, LOGS)
    assert all(failure.consequence for failure in failures)
    assert describe(RanksFailed(failures)).startswith("hung: both ranks 0, 1 wait in barrier")


@pytest.fixture
def watch():
    """Yield the watch of a launch whose only rank is this process."""
    with open_scratch() as scratch:
        scratch.start_attempt(0)
        yield Watch(scratch, 0, LOGS, None, None, False, print), scratch


def test_the_longest_silence_since_the_first_step(watch, monkeypatch):
    from instep.guard import pulse

    monkeypatch.setattr(pulse, "_here", Pulse(bytearray(64)))
    watch, scratch = watch
    watch._follow()
    assert not watch._beats
    begin_pulse(scratch.pulse(0, 0))
    watch._follow()
    time.sleep(0.1)
    pulse.here().end_step()
    watch._follow()
    assert watch._made_a_step
    assert watch._longest_s == 0  # what came before the first step says nothing of those that follow
    time.sleep(0.05)
    pulse.here().beat(Phase.FORWARD)
    watch._follow()
    assert 0.05 <= watch._longest_s < 1
    assert time.monotonic() - watch._moved_s < 1
