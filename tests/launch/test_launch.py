"""Real launches: what the user sees, and what is returned."""

import os
import signal
import threading
import time
from pathlib import Path

import launch_entries as entries

from instep.launch.failures import describe
from launch_support import is_alive


def test_results_come_back_and_every_line_is_relayed_with_its_rank(run):
    outcome = run(entries.greet, "hello")
    assert outcome.results == {rank: {"rank": rank, "threads": 1, "cwd": os.getcwd(), "attempt": 0} for rank in (0, 1)}
    lines = outcome.out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank{rank}] ")]
        assert mine[:2] == [f"[rank{rank}] hello on stdout", f"[rank{rank}] hello on stderr"]
        assert mine[-2:] == [f"[rank{rank}] 100%", f"[rank{rank}] no line end"]
        assert len(mine) <= 5  # a progress bar does not flood
    assert outcome.err == ""
    assert (outcome.logs / "rank-1.log").read_text().startswith("hello on stdout\nhello on stderr\n")


def test_split_logs_and_a_second_launch_appends(run):
    run(entries.greet, "first", split=True, processes=1)
    outcome = run(entries.greet, "second", split=True, processes=1)
    assert outcome.err == "[rank0] second on stderr\n"
    assert "first" not in outcome.out
    assert (outcome.logs / "rank-0.stderr.log").read_text() == "first on stderr\nsecond on stderr\n"


def test_the_rank_that_failed_first_is_blamed_though_it_left_last(run):
    failed = run(entries.wrong_blame).failed
    assert [failure.rank for failure in failed.failures] == [1, 0]
    assert failed.first.summary == "KeyError: 'the cause'"
    assert failed.failures[1].consequence
    text = describe(failed)
    assert text.startswith("rank 1 failed first:\nTraceback (most recent call last):\n")
    assert text.splitlines()[2].endswith('launch_entries.py", line 41, in wrong_blame')
    assert "KeyError: 'the cause'" in Path(failed.first.log).read_text()


def test_a_stubborn_rank_and_a_helper_are_gone_within_five_seconds(run, tmp_path):
    started = time.monotonic()
    outcome = run(entries.stubborn, str(tmp_path / "pid"), processes=3)
    assert time.monotonic() - started < 5
    assert outcome.failed.first.summary == "ValueError: on purpose"
    assert outcome.failed.first.exit_code == 1
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_killed_rank_is_restarted(run):
    outcome = run(entries.fails_until, 2, max_restarts=2)
    assert outcome.results == {0: 2, 1: 2}
    assert outcome.err.splitlines()[0].startswith("restart 1 of 2 after rank 1: killed (SIGKILL)")


def test_the_same_error_twice_is_not_tried_again(run):
    outcome = run(entries.same_error, max_restarts=5)
    assert "the same way twice" in outcome.failed.first.summary
    assert outcome.err.count("restart") == 1


def test_an_error_of_every_rank_is_said_once(run):
    outcome = run(entries.bad_spec, max_restarts=3)
    assert outcome.failed.first.exit_code == 2
    assert describe(outcome.failed).count("cannot be") == 1
    assert outcome.err == ""


def test_two_launches_at_once(run):
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(entries.reduce).results)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{0: 1.0, 1: 1.0}] * 2


def test_the_launching_process_is_left_as_it_was(run):
    import sys

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = (sys.modules["__main__"], dict(os.environ), [signal.getsignal(n) for n in numbers])
    run(entries.reduce)
    assert before == (sys.modules["__main__"], dict(os.environ), [signal.getsignal(n) for n in numbers])
    assert "instep-relay" not in {thread.name for thread in threading.enumerate()}
