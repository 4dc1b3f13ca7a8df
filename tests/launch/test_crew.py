"""One machine among others, on a real board; where that is the point, the news of the leading one are made by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from commands import wait_for
from instep.core.errors import RanksFailed
from instep.launch.logs import LogPlan
from instep.launch.machines.board import Board, BoardPlan
from instep.launch.machines.crew import Crew, Round
from instep.launch.machines.lead import Leader, Lookout, Word, plain
from instep.launch.machines.peers import Address, Listener
from instep.launch.machines.rounds import RoundState, Rules, environment_failure
from instep.launch.scratch import Scratch
from launch_support import hosting
from ranks import free_port

RULES = Rules(min_nodes=1, max_nodes=2, max_restarts=3, lost_after_s=1.5, endpoint="127.0.0.1")
RUNNING = RoundState(number=0, members=(0, 1), running=True)


class Leading(threading.Thread):
    """Tells the news of a state, again and again, as a leading process does."""

    def __init__(self, board: Board, state: RoundState) -> None:
        super().__init__(daemon=True)
        self.state, self._board, self._ending = state, board.line(3), threading.Event()
        self.start()

    def run(self) -> None:
        pulse = 0
        while not self._ending.wait(0.1):
            pulse += 1
            peers = dict.fromkeys(self.state.members, ("h", "127.0.0.1", 1))
            with contextlib.suppress(RuntimeError):  # a host that is gone
                self._board.post("news", {"pulse": pulse, "leader": "h1", "peers": peers, **plain(self.state)})

    def stop(self) -> None:
        self._ending.set()
        self.join()


@dataclasses.dataclass
class Place:
    """What a crew is made from."""

    board: Board
    scratch: Scratch
    said: list[str]

    def crew(self, **rules: Any) -> Crew:
        (self.scratch.folder / "attempt-0").mkdir(exist_ok=True)
        logs = LogPlan(self.scratch.folder, False)
        found = dataclasses.replace(RULES, **rules)
        return Crew(
            *(self.board, found, self.scratch, logs), address="127.0.0.1", progress=lambda: 0, say=self.said.append
        )


@pytest.fixture
def host() -> Board:
    return Board.open(BoardPlan("127.0.0.1", free_port(), "a", True), print)


@pytest.fixture
def place(host: Board, tmp_path: Path) -> Place:
    """A machine that does not lead."""
    return Place(Board.open(dataclasses.replace(host.plan, is_host=False), print), Scratch(tmp_path), [])


def closed_port() -> int:
    listener = Listener("127.0.0.1")
    listener.close()
    return listener.port


@contextlib.contextmanager
def a_rank(scratch: Scratch) -> Iterator[subprocess.Popen[str]]:
    """Have a process of round 0 that does nothing."""
    scratch.start_attempt(0)
    code = f"""
import pathlib, time
from instep.guard.pulse import begin_pulse
begin_pulse(pathlib.Path({str(scratch.pulse(0, 1))!r}))
print("here", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [0, 3])
def test_a_way_that_stays_closed_is_final_only_at_the_beginning(host: Board, place: Place, number: int) -> None:
    leading = Leading(host, dataclasses.replace(RUNNING, number=number))
    others = {1: Address("h2", "127.0.0.1", closed_port())}
    with place.crew() as crew:
        assert crew.next_round(-1) is not None
        begun = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            crew.check_reach(Round(number, Address("h1", "127.0.0.1", 1), others))
    leading.stop()
    assert time.monotonic() - begun >= RULES.lost_after_s
    assert caught.value.failures[0].final is (number == 0)
    assert "h1 (127.0.0.1) cannot reach h2 (127.0.0.1) on port" in caught.value.failures[0].summary


def test_a_way_that_opens_in_time_is_taken(place: Place) -> None:
    port, found = closed_port(), []

    def open_later() -> None:
        time.sleep(0.6)
        found.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=open_later)
    with place.crew(lost_after_s=10) as crew:
        thread.start()
        crew.check_reach(Round(2, Address("h1", "127.0.0.1", 1), {1: Address("h2", "127.0.0.1", port)}))
    thread.join()
    found[0].close()
    assert len(place.said) == 1


def test_what_it_knows_counts_more_than_that_the_host_is_gone(host: Board, place: Place) -> None:
    failure = environment_failure("rank 3: KeyError: 17", 1)
    leading = Leading(host, dataclasses.replace(RUNNING, running=False, over=True, failures=(failure,)))
    with place.crew() as crew:
        with crew._condition:
            assert crew._condition.wait_for(lambda: crew._news is not None, 5)
        leading.stop()
        crew._gone = "127.0.0.1 refuses connections"
        assert crew._why_end(0) == ("rank 3: KeyError: 17", False)
        with pytest.raises(RanksFailed) as caught:
            crew.next_round(0)
    assert caught.value.failures == (failure,)


def test_words_of_two_threads_are_told_one_after_the_other(place: Place) -> None:
    crew = place.crew()
    thread = threading.Thread(target=crew.tell_done)
    with crew._condition:  # a beat is just making its word
        before = crew._word
        thread.start()
        thread.join(0.3)
        assert crew._word is before
    thread.join()
    assert crew._word.done
    crew._listener.close()


def test_a_machine_that_hears_nothing_ends_its_ranks_before_it_is_lost(tmp_path: Path) -> None:
    port = free_port()
    scratch = Scratch(tmp_path)
    with hosting(port) as host, a_rank(scratch) as rank:
        place = Place(Board.open(BoardPlan("127.0.0.1", port, "a", False), print), scratch, [])
        leading = Leading(place.board, RUNNING)
        with place.crew(lost_after_s=4.0) as crew:
            assert crew.next_round(-1) is not None
            with crew.working(0):
                time.sleep(1.5)
                host.send_signal(signal.SIGSTOP)
                stopped_s = time.monotonic()
                rank.wait(10)
                took_s = time.monotonic() - stopped_s
        leading.stop()
    assert rank.returncode == -signal.SIGKILL
    assert 1.5 < took_s < 4.0
    found = scratch.load_failure(0, 1)
    assert found is not None
    assert "has not been heard of" in found.summary
    assert place.said == [f"{found.summary}. The ranks here are ended"]


STOPPED = """
import pathlib, sys, time
from instep.launch.logs import LogPlan
from instep.launch.machines.board import Board, BoardPlan
from instep.launch.machines.crew import Crew
from instep.launch.machines.rounds import Rules
from instep.launch.scratch import Scratch
port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
board = Board.open(BoardPlan("127.0.0.1", port, "a", False), print)
rules = Rules(min_nodes=1, max_nodes=2, max_restarts=3, lost_after_s=3.0)
with Crew(board, rules, Scratch(folder), LogPlan(folder, False), address="127.0.0.1", progress=int, say=print) as crew:
    crew.next_round(-1)
    with crew.working(0):
        print("working", flush=True)
        time.sleep(60)
"""


def test_a_launching_process_that_was_stopped_ends_its_ranks_first(host: Board, tmp_path: Path) -> None:
    leading, scratch = Leading(host, RUNNING), Scratch(tmp_path)  # which goes on to say that all is well
    words = [sys.executable, "-c", STOPPED, str(host.plan.port), str(tmp_path)]
    with a_rank(scratch) as rank, subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        time.sleep(1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        assert rank.poll() is None
        process.send_signal(signal.SIGCONT)
        rank.wait(3)
        process.kill()
    leading.stop()
    found = scratch.load_failure(0, 1)
    assert found is not None
    assert "this process was stopped, or its machine asleep" in found.summary


def test_only_the_host_of_a_board_leads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.launch.machines.crew._CLAIM_S", 0.1)
    with place.crew(lost_after_s=10) as crew:
        time.sleep(2.5)  # its host is slow
        assert crew._leader is None
        assert place.board.read("lead") is None


def test_one_leads_where_somebody_else_keeps_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.launch.machines.crew._CLAIM_S", 0.1)
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    plan = BoardPlan("127.0.0.1", port, "a", False)
    first, second = (Place(Board.open(plan, print), Scratch(tmp_path), []).crew(lost_after_s=10) for _ in range(2))
    # A claim whose answer was not waited for is still a claim: of the same machine.
    assert first._claim_lead(first._board) == str(first.key)
    with first, second:
        wait_for(lambda: first._leader is not None, timeout_s=5)
        assert first.next_round(-1) is not None
        assert second.next_round(-1) is not None
        assert second._leader is None
    del store


def test_a_machine_too_many_says_that_it_is_spare(host: Board, place: Place) -> None:
    leading = Leading(host, dataclasses.replace(RUNNING, members=(5, 6)))
    with place.crew(lost_after_s=10) as crew:
        threading.Timer(1.5, lambda: setattr(leading, "state", dataclasses.replace(RUNNING, over=True))).start()
        assert crew.next_round(-1) is None
    leading.stop()
    assert len(place.said) == 1
    assert "is spare: 2 machines are at work, as many as --nnodes allows" in place.said[0]


def word(count: int, **more: Any) -> dict[str, Any]:
    found = Word(
        count=count, name="h", address="127.0.0.1", board_address="127.0.0.1", port=1, number=0, ranks=[], left="",
        done=False, failures=[],
    )  # fmt: skip
    return dataclasses.asdict(dataclasses.replace(found, **more))


def test_a_disk_that_stalls_keeps_no_news_back(host: Board) -> None:
    """Two machines, by hand; the disk stalls when a failure is judged. The news go on, and then it is judged."""
    healed, asked = threading.Event(), []

    def progress() -> int:
        asked.append(1)
        return 5 if len(asked) == 1 else 7 * healed.wait(20)

    host.add("machines", 2)
    host.post("word/0", word(1)), host.post("word/1", word(1))
    rules = dataclasses.replace(RULES, lost_after_s=30, last_call_s=0)
    leader = Leader(host, 0, rules, progress)
    wait_for(lambda: (host.read("news") or {"running": False})["running"], timeout_s=5)
    time.sleep(1.2)
    assert len(asked) == 1
    failure = dataclasses.asdict(environment_failure("killed (SIGKILL)", 1))
    host.post("word/0", word(2, failures=[failure])), host.post("word/1", word(2, failures=[failure]))
    wait_for(lambda: len(asked) == 2, timeout_s=5)
    before = host.read("news")
    time.sleep(1.7)
    later = host.read("news")
    assert later["pulse"] >= before["pulse"] + 2
    assert later["running"]
    healed.set()
    wait_for(lambda: host.read("news")["why"].startswith("restart 1 of 3"), timeout_s=5)
    assert (len(asked), leader._state.reached) == (2, 7)
    host.post("word/1", word(3, left="done"))
    leader.close("the test is over")


def test_a_disk_that_refuses_has_brought_nothing() -> None:
    found: list[int | OSError] = [3, OSError(116, "Stale file handle"), 9]

    def progress() -> int:
        answer = found.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    lookout = Lookout(progress, 5)
    assert [lookout.ask() for _ in range(3)] == [3, 3, 9]


def test_a_claim_that_is_not_answered_is_made_again(tmp_path: Path) -> None:
    port = free_port()
    with hosting(port) as host:
        board = Board.open(BoardPlan("127.0.0.1", port, "a", False), print)
        board.has_host = False  # as where somebody else keeps the store
        crew = Place(board, Scratch(tmp_path), []).crew()
        crew._began_s -= 60
        host.send_signal(signal.SIGSTOP)
        crew._lead_if_nobody_does()
        assert crew._leader is None
        host.send_signal(signal.SIGCONT)
        crew._lead_if_nobody_does()
        assert crew._leader is not None
        crew._leader.close("the test is over")
        crew._listener.close()
