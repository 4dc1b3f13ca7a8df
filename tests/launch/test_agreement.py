"""Launching processes meet at a real board: who is refused, who is warned, who is not let wait.

The machines are threads here: what they exchange goes through the store, as between processes.
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

from instep.core.errors import EnvironmentFailed, FailureRecord, SpecError
from instep.core.spec import LaunchSpec
from instep.launch.machines.board import Board, BoardPlan
from instep.launch.machines.company import Wishes, in_company
from instep.launch.scratch import Scratch
from instep.train.nodes import look_around
from launch_support import hosting
from ranks import free_port, run_ranks


class Machine(threading.Thread):
    """One launching process, until it is told to leave."""

    def __init__(self, port, scratch, *, asked=None, shift_s=0.0, job="a", **spec):
        super().__init__(daemon=True)
        self.spec = LaunchSpec(**{"nnodes": "2", "rdzv_endpoint": f"127.0.0.1:{port}"} | spec)
        self.port, self.scratch, self.job = port, Scratch(scratch), job
        self.asked, self.shift_ns = asked or {}, int(shift_s * 1e9)
        self.said, self.error, self.company = [], None, None
        self.ready, self.leaving = threading.Event(), threading.Event()
        self.start()

    def run(self):
        try:
            board = Board.open(BoardPlan("127.0.0.1", self.port, self.job, None, 20), self.said.append)
            clock = lambda: time.time_ns() + self.shift_ns  # noqa: E731
            with in_company(board, self.spec, 1, Wishes(self.asked), self.scratch, self.said.append, clock) as company:
                self.company = company
                self.ready.set()
                self.leaving.wait(30)
        except Exception as error:
            self.error = error
        finally:
            self.ready.set()


@pytest.fixture
def meet(tmp_path):
    """Return `meet(dict, dict, …)`: machines with these options at one endpoint, when all are through."""
    begun = []

    def start(*options, port=None):
        port = port or free_port()
        machines = []
        for each in options:
            machines.append(Machine(port, tmp_path, **each))
            begun.append(machines[-1])
            time.sleep(0.05)  # so that the first one hosts
        for machine in machines:
            assert machine.ready.wait(30)
        return machines

    yield start
    for machine in reversed(begun):  # the host last
        machine.leaving.set()
        machine.join(10)
        assert not machine.is_alive()


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
    machines = meet(first, second)
    for machine in machines:
        assert isinstance(machine.error, SpecError)
        with pytest.raises(SpecError, match=text):
            raise machine.error
    assert str(machines[0].error) == str(machines[1].error)
    assert time.monotonic() - begun < 15


def test_machines_that_agree_are_let_through_and_a_number_without_use_is_said(meet):
    machines = meet({"node_rank": 0, "local_addr": "127.0.0.1"}, {"node_rank": 1, "local_addr": "127.0.0.2"})
    host = socket.gethostname()
    for number, machine in enumerate(machines):
        assert machine.error is None
        assert machine.company.name == f"{host} at 127.0.0.{number + 1}"
        assert machine.said == [
            f"--node-rank {number} is ignored: with --rdzv-backend c10d the machines are numbered as they meet. "
            "--rdzv-backend static keeps the numbers."
        ]


@pytest.mark.parametrize("shift_s", [5.0, -5.0])
def test_a_clock_that_is_off_is_said_and_put_right(meet, shift_s):
    first, second = meet({}, {"shift_s": shift_s})
    way = "ahead of" if shift_s > 0 else "behind"
    for machine in (first, second):
        assert machine.error is None
        (said,) = [line for line in machine.said if "clock" in line]
        assert f"is 5.0 s {way} that of" in said
    now_ns = time.time_ns()
    noted = FailureRecord(rank=1, time_ns=now_ns + second.shift_ns, summary="x")
    (told,) = second.company.tell_of([noted], 0)
    assert abs(told.time_ns - now_ns) <= told.doubt_ns
    assert 0 < told.doubt_ns < 10**9
    assert first.company.tell_of([dataclasses.replace(noted, time_ns=now_ns)], 0)[0].time_ns == now_ns


def test_who_was_lost_without_a_word_contradicts_nobody(meet):
    port = free_port()
    (first,) = meet({"nnodes": "1:2", "node_rank": 0}, port=port)
    board = Board.open(BoardPlan("127.0.0.1", port, "a", False), print)
    card = board.read("roll/card/0")
    number = board.add("roll/count") - 1
    board.post(f"roll/card/{number}", {**card, "number": number, "node_rank": 1})  # and never a beat
    board.post(f"roll/clock/{number}", {})
    (third,) = meet({"nnodes": "1:2", "node_rank": 1}, port=port)
    assert third.error is None
    (fourth,) = meet({"nnodes": "1:2", "node_rank": 0}, port=port)
    assert "--node-rank 0 was given" in str(fourth.error)
    (again,) = meet({"nnodes": "1:2", "node_rank": 1}, port=port)  # its own number is third's, who lives
    assert "--node-rank 1 was given" in str(again.error)
    third.leaving.set()
    third.join(10)
    (last,) = meet({"nnodes": "1:2", "node_rank": 1}, port=port)
    assert last.error is None
    assert first.error is None


def test_another_job_at_the_endpoint_is_refused(meet):
    port = free_port()
    meet({"nnodes": "1:2"}, port=port)
    (other,) = meet({"nnodes": "1:2", "job": "b"}, port=port)
    assert isinstance(other.error, EnvironmentFailed)
    assert "is where the job 'a' meets, and this one is 'b'" in str(other.error)


def test_machines_that_do_not_come_are_counted(tmp_path):
    plan = BoardPlan("127.0.0.1", free_port(), "a", True, join_timeout_s=0.2)
    company = in_company(Board.open(plan, print), LaunchSpec(nnodes="2"), 1, Wishes(), Scratch(tmp_path), print)
    with pytest.raises(EnvironmentFailed, match=r"Only 1 of 2 machines came to 127\.0\.0\.1"), company:
        pass


@pytest.mark.parametrize(
    ("end", "words"), [(signal.SIGKILL, "has ended: 127.0.0.1:"), (signal.SIGSTOP, "no longer answers: ")]
)
def test_a_host_that_goes_during_the_roll_call_is_told(tmp_path, end, words):
    port = free_port()
    with hosting(port) as host:
        machine = Machine(port, tmp_path, nnodes="2", lost_after="5s")
        board = Board.open(BoardPlan("127.0.0.1", port, "a", False), print)
        assert board.wait("roll/card/0")
        time.sleep(0.3)
        host.send_signal(end)
        machine.join(20)
        assert not machine.is_alive()
    assert isinstance(machine.error, EnvironmentFailed)
    where = f"The process that hosts 127.0.0.1:{port}, where the machines of this job meet, "
    assert str(machine.error).startswith(where + words)


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
def test_a_program_that_is_no_board_is_found_out(answer, is_host):
    begun = time.monotonic()
    with stranger(answer) as port, pytest.raises(EnvironmentFailed, match="another program listens there"):
        Board.open(BoardPlan("127.0.0.1", port, "a", is_host), lambda _: None)
    assert time.monotonic() - begun < 12


def test_a_program_that_says_nothing_is_not_waited_for():
    begun = time.monotonic()
    with stranger(None) as port, pytest.raises(EnvironmentFailed, match="another program listens there"):
        Board.open(BoardPlan("127.0.0.1", port, "a", None), lambda _: None)
    assert time.monotonic() - begun < 20


def compare_as_machines(world, code):
    """Be the first rank of a machine of its own."""
    os.environ["OMP_NUM_THREADS"] = str(world.rank + 1)
    world.place = dataclasses.replace(world.place, local_rank=0)
    own, found = look_around(world, [Path(code)], exact=False, compare=True)
    alone = look_around(world, [Path(code)], exact=False, compare=False)
    return own is not None and own.code, found, alone[1]


def test_ranks_of_another_launcher_compare_their_machines():
    host = socket.gethostname()
    for code, found, unsaid in run_ranks(compare_as_machines, 2, __file__):
        assert list(code) == [Path(__file__).name]
        assert found == [f"OMP_NUM_THREADS is 1 on {host} (rank 0), 2 on {host} (rank 1)."]
        assert unsaid == []
