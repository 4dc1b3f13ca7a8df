"""Scripts that start their own ranks (`mp.spawn`), or meet at an address of their own, under `instep run`."""

from __future__ import annotations

from instep.launch.resources import free_ports
from instep.launch.script import run_script
from launch_support import SCRIPTS

SPAWNS = SCRIPTS / "spawns.py"


def test_one_process_runs_it(run):
    (port,) = free_ports(1)
    outcome = run(run_script, str(SPAWNS), [str(port), "work"], False, processes=1)
    assert outcome.failed is None
    assert outcome.out.splitlines() == ["[rank0] sum 3.0"] * 2


def test_a_failure_has_the_ranks_traceback(run):
    (port,) = free_ports(1)
    failed = run(run_script, str(SPAWNS), [str(port), "raise"], False, processes=1).failed
    assert "Process 1 terminated with the following error" in failed.first.traceback
    assert "ValueError: rank one is unhappy" in failed.first.traceback
    assert failed.first.exit_code == 1


def test_a_hang_names_the_rank_and_its_line(run):
    (port,) = free_ports(1)
    failed = run(run_script, str(SPAWNS), [str(port), "hang"], False, processes=1, hang_after="2s").failed
    number = SPAWNS.read_text().partition("hangs here")[0].count("\n") + 1
    assert "for the processes that it spawned, of which rank 1 is in" in failed.first.summary
    assert f"spawns.py:{number} work (blocked" in failed.first.summary
    assert "rank 0 waits for it in all_reduce (spawns.py:" in failed.first.summary
    assert failed.first.exit_code == 3


def test_a_rendezvous_of_its_own(run):
    (port,) = free_ports(1)
    outcome = run(run_script, str(SPAWNS), [str(port), "work", "launched"], False)
    assert outcome.failed is None
    assert sorted(outcome.out.splitlines()) == ["[rank0] sum 3.0", "[rank1] sum 3.0"]
