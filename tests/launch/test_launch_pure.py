"""Blame, restarts and counts, without a process."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import SignalException

from instep.core.errors import EnvironmentFailed, FailureRecord, NumericsError, RanksFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.launch import elastic
from instep.launch.failures import complete_failures, describe, failure_of_exception, order_failures
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.membership.rendezvous import StorePlan, plan_store, split_endpoint
from instep.launch.processes import check_process_count
from instep.launch.restart import plan_restart
from instep.launch.scratch import open_scratch, pid_namespace

failures = st.builds(
    FailureRecord,
    rank=st.integers(0, 7),
    time_ns=st.integers(0, 10**10),
    summary=st.sampled_from(["ValueError: a", "KeyError: b", "killed (SIGKILL)", "NumericsError: nan"]),
    exit_code=st.sampled_from([1, 2, 3]),
    consequence=st.booleans(),
)
some_failures = st.lists(failures, min_size=1, max_size=8, unique_by=lambda f: f.rank)


class DistBackendError(RuntimeError):
    """Stands for torch's, by its name."""


def record(error, rank=0):
    try:
        raise error
    except BaseException as raised:
        return failure_of_exception(raised, rank, 1, "log")


@given(some_failures)
def test_the_first_is_the_earliest_that_is_no_consequence(records):
    ordered = order_failures(records)
    assert sorted(map(repr, ordered)) == sorted(map(repr, records))
    causes = [record for record in records if not record.consequence] or records
    assert ordered[0].time_ns == min(record.time_ns for record in causes)
    assert ordered[0] in causes


@given(some_failures, st.dictionaries(st.integers(0, 7), st.tuples(st.sampled_from([-9, -15, 1, 0]), st.just(0))))
def test_every_rank_is_reported_once_and_a_silent_death_above_consequences(records, exits):
    ordered = complete_failures(records, exits, {})
    assert len({failure.rank for failure in ordered}) == len(ordered)
    assert {record.rank for record in records} <= {failure.rank for failure in ordered}
    recorded = {record.rank for record in records}
    killed = {rank for rank, (code, _) in exits.items() if code == -9} - recorded
    assert killed <= {failure.rank for failure in ordered}
    if killed:
        assert not ordered[0].consequence
    assert not {rank for rank, (code, _) in exits.items() if code == -15} & {f.rank for f in ordered} - recorded


def test_sigterm_from_outside_is_a_failure_when_there_is_no_other():
    assert complete_failures([], {1: (-15, 0)}, {})[0].summary.startswith("killed (SIGTERM)")


@pytest.mark.parametrize(
    ("error", "exit_code", "consequence"),
    [
        (KeyError("x"), 1, False),
        (SpecError("x"), 2, False),
        (NumericsError("x"), 1, False),
        (MemoryError(), 3, False),
        (RuntimeError("CUDA out of memory"), 3, False),
        (DistBackendError("anything"), 3, True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), 3, True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), 3, True),
        (RuntimeError("The server socket has failed to listen: EADDRINUSE"), 3, False),
        (ConnectionRefusedError("the user's own server"), 1, False),
        (SystemExit(2), 2, False),
        (SystemExit("sorry"), 1, False),
    ],
)
def test_exceptions_are_judged(error, exit_code, consequence):
    failure = record(error)
    assert (failure.exit_code, failure.consequence) == (exit_code, consequence)
    assert "\n" not in failure.summary
    assert failure.summary


def test_a_traceback_begins_at_the_users_first_frame():
    import runpy

    def users():
        runpy.run_path("nowhere.py")

    try:
        plan_rendezvous_calls(users)
    except OSError as error:
        text = failure_of_exception(error, 0, 1, "").traceback
    assert text.splitlines()[1].strip().startswith(f'File "{__file__}"')


def plan_rendezvous_calls(function):
    function()


def test_a_long_message_of_ours_is_kept_whole():
    failure = record(SpecError("These fields differ:\n  seed: 0, was 1\n  batch_size: 2, was 3"))
    text = describe(RanksFailed([failure]))
    assert "seed: 0, was 1" in text
    assert "batch_size: 2, was 3" in text


@given(some_failures, some_failures, st.integers(0, 4), st.integers(0, 3))
def test_restarts(now, before, attempt, most):
    plan = plan_restart(now, before, attempt, most)
    same = now[0].exit_code == 1 and now[0].summary == before[0].summary
    assert plan.restart == (attempt < most and not now[0].final and not same)
    assert [failure.rank for failure in plan.failures] == [failure.rank for failure in now]
    early = plan_restart(now, (), attempt, most, has_begun=False)
    assert early.restart == (attempt < most and not now[0].final and now[0].exit_code != 1)


def test_an_error_is_recognised_though_a_number_in_it_changed():
    first, again = (record(IndexError(f"Target {target} is out of bounds at {hex(target)}.")) for target in (104, 77))
    plan = plan_restart([again], [first], 1, 9)
    assert not plan.restart
    assert "Target 77 is out of bounds at 0x4d. (not restarted again" in plan.failures[0].summary
    assert plan_restart([record(IndexError("another"))], [first], 1, 9).restart


def test_process_counts():
    assert check_process_count("auto", 8, 2) == 2
    assert check_process_count("auto", 8, 0) == 8
    assert check_process_count("cpu", 8, 2) == 8
    assert check_process_count("3", 1, 0) == 3
    assert check_process_count(64, 1, 0) == 64
    for wrong in ("gpu", 0, 65, "many"):
        with pytest.raises(SpecError, match="processes="):
            check_process_count(LaunchSpec(processes=wrong).processes, 2, 0)


def test_where_nodes_meet():
    assert plan_store(LaunchSpec()) is None
    two = LaunchSpec(nnodes="2", rdzv_endpoint="host:1", rdzv_backend="static", node_rank=1)
    assert plan_store(two) == StorePlan("host", 1, "instep", False)
    several = LaunchSpec(nnodes="1:2", rdzv_endpoint="host", rdzv_id="mine")
    assert plan_store(several) == StorePlan("host", 29400, "mine", None)
    for wrong in (
        LaunchSpec(nnodes="2"),
        LaunchSpec(nnodes="1:2", rdzv_endpoint="host:1", rdzv_backend="static"),
        LaunchSpec(nnodes="2", rdzv_endpoint="host:1", rdzv_backend="static", node_rank=2),
        LaunchSpec(nnodes="2", rdzv_endpoint="host", rdzv_backend="static"),
        LaunchSpec(rdzv_conf="timeout"),
        LaunchSpec(nnodes="2", rdzv_endpoint="host:1", rdzv_conf="store_type=file"),
    ):
        with pytest.raises(SpecError):
            plan_store(wrong)


def test_endpoints():
    assert split_endpoint("host:12") == ("host", 12)
    assert split_endpoint("host") == ("host", 29400)
    assert split_endpoint("[::1]:12") == ("::1", 12)
    assert split_endpoint("fe80::1") == ("fe80::1", 29400)


SIGNALS = [(signal.SIGTERM, EnvironmentFailed, "ended by SIGTERM"), (signal.SIGINT, KeyboardInterrupt, None)]


@pytest.mark.parametrize(("number", "expected", "message"), SIGNALS)
@pytest.mark.parametrize("disguise", [None, UnboundLocalError, RuntimeError])
def test_a_signal_is_found_behind_what_elastic_makes_of_it(monkeypatch, tmp_path, number, expected, message, disguise):
    class Agent:
        def __init__(self, *_):
            pass

        def __call__(self, *_):
            try:
                raise SignalException("in the midst of its bookkeeping", number)
            finally:
                if disguise is not None:
                    raise disguise("a variable is not set yet")

    monkeypatch.setattr(elastic, "elastic_launch", Agent)
    logs = LogPlan(tmp_path, split=False)
    with pytest.raises(expected, match=message):
        launch(LaunchJob(print, (), LaunchSpec(), logs, stdout=None, stderr=None))


def test_semaphores_of_a_killed_launcher_are_removed() -> None:
    """Only those: not a living launcher's, not fresh ones, and nobody else's."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    shm = Path("/dev/shm")
    dead, fresh, living, other = (
        shm / name
        for name in (
            f"sem.instep-{pid_namespace()}-{ended.pid}-dead",
            f"sem.instep-{pid_namespace()}-{ended.pid}-fresh",
            f"sem.instep-{pid_namespace()}-{os.getpid()}-living",
            f"sem.mp-{ended.pid}",
        )
    )
    try:
        for path in (dead, fresh, living, other):
            path.touch()
            if path != fresh:
                os.utime(path, (1, 1))
        with open_scratch():
            assert [path.exists() for path in (dead, fresh, living, other)] == [False, True, True, True]
    finally:
        for path in (dead, fresh, living, other):
            path.unlink(missing_ok=True)
