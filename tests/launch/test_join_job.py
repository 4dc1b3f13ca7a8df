"""Launchers join a job at a real control store: which are refused, warned, or told why they wait.

The nodes are threads here: what they exchange goes through the store, as between processes.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from commands import wait_for
from instep.core.errors import EnvironmentFailed, FailureRecord, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob
from instep.launch.logs import LogPlan
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.heartbeat import Heartbeat
from instep.launch.membership.node_info import JobRequest
from instep.launch.membership.rendezvous import StorePlan
from instep.launch.nodes import join_job
from instep.launch.scratch import Scratch
from instep.train.nodes import look_around
from launch_support import hosting
from ranks import free_port, run_ranks


class SaidJob(LaunchJob):
    """A job whose lines are kept in a list."""

    def say(self, text):
        self.stderr.append(text)


class Node(threading.Thread):
    """One launcher, until it is told to leave."""

    def __init__(self, port, scratch, *, asked=None, shift_s=0.0, job="a", **spec):
        super().__init__(daemon=True)
        self.spec = LaunchSpec(**{"nnodes": "2", "rdzv_endpoint": f"127.0.0.1:{port}"} | spec)
        self.spec = dataclasses.replace(self.spec, rdzv_conf=self.spec.rdzv_conf or "last_call_timeout=0")
        self.port, self.scratch, self.job = port, Scratch(scratch), job
        self.asked, self.shift_ns = asked or {}, int(shift_s * 1e9)
        self.said, self.error, self.agent, self.generation = [], None, None, None
        self.ready, self.leaving = threading.Event(), threading.Event()
        self.start()

    def run(self):
        try:
            store = ControlStore.open(StorePlan("127.0.0.1", self.port, self.job, None, 20), self.said.append)
            logs = LogPlan(self.scratch.folder)
            job = SaidJob(print, (), self.spec, logs, stdout=None, stderr=self.said, request=JobRequest(self.asked))
            clock = lambda: time.time_ns() + self.shift_ns  # noqa: E731
            with join_job(store, job, self.scratch, logs, clock) as self.agent:
                self.generation = self.agent.next_generation(-1)
                self.ready.set()
                self.leaving.wait(30)
        except Exception as error:
            self.error = error
        finally:
            self.ready.set()


@pytest.fixture
def meet(tmp_path):
    """Return `meet(dict, dict, …)`: nodes with these options at one endpoint, when all are through."""
    begun = []

    def start(*options, port=None):
        port = port or free_port()
        nodes = []
        for each in options:
            nodes.append(Node(port, tmp_path, **each))
            begun.append(nodes[-1])
            time.sleep(0.05)  # so that the first one hosts
        for node in nodes:
            assert node.ready.wait(30)
        return nodes

    yield start
    for node in reversed(begun):  # the host last
        node.leaving.set()
        node.join(10)
        assert not node.is_alive()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"nnodes": "2"}, {"nnodes": "3"}, "was started with --nnodes 2, .* with --nnodes 3"),
        ({"node_rank": 0}, {"node_rank": 0}, "--node-rank 0 was given on .* and on "),
        ({"asked": {"seed": 0}}, {"asked": {"seed": 1}}, "seed: [01] on .*, [01] on "),
    ],
)
def test_both_say_why_they_cannot_work_together(meet, first, second, text):
    begun = time.monotonic()
    nodes = meet(first, second)
    for node in nodes:
        assert isinstance(node.error, SpecError)
        with pytest.raises(SpecError, match=text):
            raise node.error
    assert str(nodes[0].error) == str(nodes[1].error)
    assert time.monotonic() - begun < 15


def test_nodes_that_agree_are_let_through_and_a_number_without_use_is_said(meet):
    nodes = meet({"node_rank": 0, "local_addr": "127.0.0.1"}, {"node_rank": 1, "local_addr": "127.0.0.2"})
    host = socket.gethostname()
    for number, node in enumerate(nodes):
        assert node.error is None
        assert node.generation.own.name == f"{host} at 127.0.0.{number + 1}"
        assert node.said == [
            f"--node-rank {number} is ignored: with --rdzv-backend c10d the nodes are numbered as they join. "
            "--rdzv-backend static keeps the numbers."
        ]


@pytest.mark.parametrize("shift_s", [5.0, -5.0])
def test_a_clock_that_is_off_is_said_and_put_right(meet, shift_s):
    first, second = meet({}, {"shift_s": shift_s})
    way = "ahead of" if shift_s > 0 else "behind"
    for node in (first, second):
        assert node.error is None
        (said,) = [line for line in node.said if "clock" in line]
        assert f"is 5.0 s {way} that of" in said
    now_ns = time.time_ns()
    for node in (first, second):
        noted = FailureRecord(rank=1, time_ns=now_ns + node.shift_ns, summary="x")
        node.agent.report_failures([noted], 0)
        (reported,) = node.agent._heartbeat.failures
        assert abs(reported.time_ns - now_ns) <= reported.doubt_ns
        assert (0 < reported.doubt_ns < 10**9) == (node is second)
        assert reported.host == node.generation.own.name


def test_a_node_may_take_the_node_rank_of_one_that_is_lost(meet):
    port = free_port()
    common = {"nnodes": "1:2", "lost_after": "5s"}
    (first,) = meet({**common, "node_rank": 0}, port=port)
    store = ControlStore.open(StorePlan("127.0.0.1", port, "a", False), print)
    key = store.add("nodes")
    store.set(f"node/{key}", {**store.get("node/0"), "key": key, "node_rank": 1})
    store.set(f"heartbeat/{key}", Heartbeat(count=1))  # and never another one
    (third,) = meet({**common, "node_rank": 1}, port=port)
    assert third.error is None
    (fourth,) = meet({**common, "node_rank": 0}, port=port)
    assert "--node-rank 0 was given" in str(fourth.error)
    (again,) = meet({**common, "node_rank": 1}, port=port)  # its node rank is that of the third, which lives
    assert "--node-rank 1 was given" in str(again.error)
    third.leaving.set()
    third.join(10)
    (last,) = meet({**common, "node_rank": 1}, port=port)
    assert last.error is None
    assert first.error is None


def test_another_job_at_the_endpoint_is_refused(meet):
    port = free_port()
    meet({"nnodes": "1:2"}, port=port)
    (other,) = meet({"nnodes": "1:2", "job": "b"}, port=port)
    assert isinstance(other.error, EnvironmentFailed)
    assert "belongs to the job 'a', and this one is 'b'" in str(other.error)


def test_nodes_that_do_not_join_are_counted(meet):
    (alone,) = meet({"rdzv_conf": "join_timeout=0.2"})
    assert isinstance(alone.error, EnvironmentFailed)
    assert str(alone.error).startswith("Only 1 of 2 nodes joined 127.0.0.1:")


@pytest.mark.parametrize(
    ("end", "words"), [(signal.SIGKILL, "has ended: 127.0.0.1:"), (signal.SIGSTOP, "has not answered ")]
)
def test_a_host_that_goes_before_the_job_starts_is_named(tmp_path, end, words):
    port = free_port()
    with hosting(port) as host:
        node = Node(port, tmp_path, nnodes="2", lost_after="5s")
        store = ControlStore.open(StorePlan("127.0.0.1", port, "a", False), print)
        wait_for(lambda: store.get("heartbeat/1") is not None, timeout_s=5)
        time.sleep(0.3)
        host.send_signal(end)
        node.join(20)
        assert not node.is_alive()
    assert isinstance(node.error, EnvironmentFailed)
    assert str(node.error).startswith(f"127.0.0.1, which hosts the rendezvous at 127.0.0.1:{port}, {words}")


@contextlib.contextmanager
def stranger(answer):
    """Listen as another program would: hang up, answer, or say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].sendall(answer)
                        held[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.mark.parametrize("is_host", [True, False, None])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_program_that_is_no_store_is_recognized(answer, is_host):
    begun = time.monotonic()
    with stranger(answer) as port, pytest.raises(EnvironmentFailed, match="another program listens there"):
        ControlStore.open(StorePlan("127.0.0.1", port, "a", is_host), lambda _: None)
    assert time.monotonic() - begun < 12


def test_a_program_that_says_nothing_is_not_waited_for():
    begun = time.monotonic()
    with stranger(None) as port, pytest.raises(EnvironmentFailed, match="another program listens there"):
        ControlStore.open(StorePlan("127.0.0.1", port, "a", None), lambda _: None)
    assert time.monotonic() - begun < 20


def compare_as_nodes(world, code):
    """Be the first rank of a node of its own."""
    os.environ["OMP_NUM_THREADS"] = str(world.rank + 1)
    world.place = dataclasses.replace(world.place, local_rank=0)
    own, differing = look_around(world, [Path(code)], exact=False, compare=True)
    alone = look_around(world, [Path(code)], exact=False, compare=False)
    return own is not None and own.code, differing, alone[1]


def test_ranks_of_another_launcher_compare_their_nodes():
    host = socket.gethostname()
    for code, actual, unsaid in run_ranks(compare_as_nodes, 2, __file__):
        assert list(code) == [Path(__file__).name]
        assert actual == [f"OMP_NUM_THREADS is 1 on {host} (rank 0), 2 on {host} (rank 1)."]
        assert unsaid == []
