"""One node agent at a real control store; where that is the point, the job state is published by the test."""

from __future__ import annotations

import contextlib
import dataclasses
import os
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

import patience
from commands import wait_for
from instep.core.errors import RanksFailed
from instep.launch.failures import environment_failure
from instep.launch.logs import LogPlan
from instep.launch.membership.agent import Generation, NodeAgent
from instep.launch.membership.clock_offset import Offset
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.generations import LeaderState, Rules
from instep.launch.membership.heartbeat import Heartbeat, JobState
from instep.launch.membership.leader import Leader, ProgressProbe
from instep.launch.membership.peers import Address, Listener
from instep.launch.membership.rendezvous import StorePlan
from instep.launch.scratch import Scratch
from launch_support import SCRIPTS, hosting, node_info
from ranks import free_port

RULES = Rules(min_nodes=1, max_nodes=2, max_restarts=3, lost_after_s=1.5, endpoint="127.0.0.1")
RUNNING = LeaderState(generation=0, members=(0, 1), running=True)


class Publisher(threading.Thread):
    """Publishes a job state again and again, as a leader does."""

    def __init__(self, store: ControlStore, state: JobState) -> None:
        super().__init__(daemon=True)
        self.state, self._store, self._ending = state, store.connect(3), threading.Event()
        self.start()

    def run(self) -> None:
        count = 0
        while not self._ending.wait(0.1):
            count += 1
            peers = dict.fromkeys(self.state.members, Address("h", "127.0.0.1", 1))
            state = dataclasses.replace(self.state, count=count, leader=Address("h1", "127.0.0.1", 1), peers=peers)
            with contextlib.suppress(RuntimeError):  # a host that is gone
                self._store.set("job", state.to_json())

    def stop(self) -> None:
        self._ending.set()
        self.join()


@dataclasses.dataclass
class Place:
    """What an agent is made from."""

    store: ControlStore
    scratch: Scratch
    said: list[str]

    def agent(self, **rules: Any) -> NodeAgent:
        (self.scratch.folder / "attempt-0").mkdir(exist_ok=True)
        logs = LogPlan(self.scratch.folder, False)
        node = node_info(self.store.add("nodes"), address="127.0.0.1")
        self.store.set(f"node/{node.key}", node)
        changed = dataclasses.replace(RULES, **rules)
        return NodeAgent(*(self.store, node, changed, self.scratch, logs), progress=lambda: 0, say=self.said.append)


@pytest.fixture
def host() -> ControlStore:
    return ControlStore.open(StorePlan("127.0.0.1", free_port(), "a", True), print)


@pytest.fixture
def place(host: ControlStore, tmp_path: Path) -> Place:
    """A node that does not lead."""
    return Place(ControlStore.open(dataclasses.replace(host.plan, is_host=False), print), Scratch(tmp_path), [])


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
def test_a_way_that_stays_closed_is_final_only_at_the_beginning(host: ControlStore, place: Place, number: int) -> None:
    publisher = Publisher(host, dataclasses.replace(RUNNING, generation=number))
    others = {1: Address("h2", "127.0.0.1", closed_port())}
    with place.agent() as agent:
        assert agent.next_generation(-1) is not None
        begun = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            agent.check_reach(Generation(number, Address("h1", "127.0.0.1", 1), others))
    publisher.stop()
    assert time.monotonic() - begun >= RULES.lost_after_s
    assert caught.value.failures[0].final is (number == 0)
    assert "h1 (127.0.0.1) cannot reach h2 (127.0.0.1) on port" in caught.value.failures[0].summary


def test_a_way_that_opens_in_time_is_taken(place: Place) -> None:
    port, servers = closed_port(), []

    def open_later() -> None:
        time.sleep(0.6)
        servers.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=open_later)
    with place.agent(lost_after_s=10) as agent:
        thread.start()
        agent.check_reach(Generation(2, Address("h1", "127.0.0.1", 1), {1: Address("h2", "127.0.0.1", port)}))
    thread.join()
    servers[0].close()
    assert len(place.said) == 1


def test_what_it_knows_counts_more_than_that_the_host_is_gone(host: ControlStore, place: Place) -> None:
    failure = environment_failure("rank 3: KeyError: 17", 1)
    publisher = Publisher(host, dataclasses.replace(RUNNING, running=False, over=True, failures=(failure,)))
    with place.agent() as agent:
        with agent._condition:
            assert agent._condition.wait_for(lambda: agent._job is not None, 5)
        publisher.stop()
        agent._gone = "127.0.0.1 refuses connections"
        assert agent._why_end(0) == ("rank 3: KeyError: 17", False)
        with pytest.raises(RanksFailed) as caught:
            agent.next_generation(0)
    assert caught.value.failures == (failure,)


def test_heartbeats_of_two_threads_are_told_one_after_the_other(place: Place) -> None:
    agent = place.agent()
    thread = threading.Thread(target=agent.report_done)
    with agent._condition:  # a heartbeat is just being made
        before = agent._heartbeat
        thread.start()
        thread.join(0.3)
        assert agent._heartbeat is before
    thread.join()
    assert agent._heartbeat.done


def test_a_node_that_receives_nothing_ends_its_ranks_before_it_is_lost(tmp_path: Path) -> None:
    port = free_port()
    scratch = Scratch(tmp_path)
    with hosting(port) as host, a_rank(scratch) as rank:
        place = Place(ControlStore.open(StorePlan("127.0.0.1", port, "a", False), print), scratch, [])
        publisher = Publisher(place.store, RUNNING)
        with place.agent(lost_after_s=4.0) as agent:
            assert agent.next_generation(-1) is not None
            with agent.working(0):
                time.sleep(1.5)
                host.send_signal(signal.SIGSTOP)
                stopped_s = time.monotonic()
                rank.wait(10)
                took_s = time.monotonic() - stopped_s
        publisher.stop()
    assert rank.returncode == -signal.SIGKILL
    assert 1.5 < took_s < 4.0
    actual = scratch.load_failure(0, 1)
    assert actual is not None
    assert "has not answered h" in actual.summary
    assert place.said == [f"{actual.summary}. The ranks here are ended"]


STOPPED = """
import pathlib, sys, time
from instep.launch.logs import LogPlan
from instep.launch.membership.agent import NodeAgent
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.generations import Rules
from instep.launch.membership.rendezvous import StorePlan
from instep.launch.scratch import Scratch
from launch_support import node_info
port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
store = ControlStore.open(StorePlan("127.0.0.1", port, "a", False), print)
rules = Rules(min_nodes=1, max_nodes=2, max_restarts=3, lost_after_s=3.0)
with NodeAgent(store, node_info(1), rules, Scratch(folder), LogPlan(folder, False), progress=int, say=print) as agent:
    agent.next_generation(-1)
    with agent.working(0):
        print("working", flush=True)
        time.sleep(60)
"""


def test_a_launcher_that_was_stopped_ends_its_ranks_first(host: ControlStore, tmp_path: Path) -> None:
    publisher, scratch = Publisher(host, RUNNING), Scratch(tmp_path)  # which goes on to say that all is well
    words = [sys.executable, "-c", STOPPED, str(host.plan.port), str(tmp_path)]
    with (
        a_rank(scratch) as rank,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        time.sleep(1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        assert rank.poll() is None
        process.send_signal(signal.SIGCONT)
        rank.wait(3 * patience.PATIENCE)
        process.kill()
    publisher.stop()
    actual = scratch.load_failure(0, 1)
    assert actual is not None
    assert "this launcher was stopped, or its machine suspended" in actual.summary


def test_only_the_host_of_a_store_leads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.launch.membership.agent._CLAIM_S", 0.1)
    with place.agent(lost_after_s=10) as agent:
        time.sleep(2.5)  # its host is slow
        assert agent._leader is None
        assert place.store.get("lead") is None


def test_one_leads_where_somebody_else_keeps_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.launch.membership.agent._CLAIM_S", 0.1)
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    plan = StorePlan("127.0.0.1", port, "a", False)
    first, second = (
        Place(ControlStore.open(plan, print), Scratch(tmp_path), []).agent(lost_after_s=10) for _ in range(2)
    )
    # A claim whose answer was not waited for is still a claim: of the same machine.
    assert first._claim_lead(first._store) == str(first.key)
    with first, second:
        wait_for(lambda: first._leader is not None, timeout_s=5)
        assert first.next_generation(-1) is not None
        assert second.next_generation(-1) is not None
        assert second._leader is None
    del store


def test_a_node_too_many_says_that_it_is_spare(host: ControlStore, place: Place) -> None:
    publisher = Publisher(host, dataclasses.replace(RUNNING, members=(5, 6)))
    with place.agent(lost_after_s=10) as agent:
        threading.Timer(1.5, lambda: setattr(publisher, "state", dataclasses.replace(RUNNING, over=True))).start()
        assert agent.next_generation(-1) is None
    publisher.stop()
    assert len(place.said) == 1
    assert "is spare: 2 nodes are at work, as many as --nnodes allows" in place.said[0]


def send(store: ControlStore, key: int, count: int, **more: Any) -> None:
    store.set(f"heartbeat/{key}", Heartbeat(count=count, generation=0, clock=Offset(), **more))


def test_a_disk_that_stalls_does_not_hold_the_job_state_back(host: ControlStore) -> None:
    """Two nodes, by hand; the disk stalls when a failure is judged. The leader publishes on, and then judges it."""
    healed, asked = threading.Event(), []

    def progress() -> int:
        asked.append(1)
        return 5 if len(asked) == 1 else 7 * healed.wait(20)

    host.add("nodes", 1)
    for key in (0, 1):
        host.set(f"node/{key}", node_info(key))
        send(host, key, 1)
    leader = Leader(host, 0, dataclasses.replace(RULES, lost_after_s=30, last_call_s=0), progress)
    wait_for(lambda: (host.get("job") or {"running": False})["running"], timeout_s=5)
    time.sleep(1.2)
    assert len(asked) == 1
    for key in (0, 1):
        send(host, key, 2, failures=(environment_failure("killed (SIGKILL)", 1),))
    wait_for(lambda: len(asked) == 2, timeout_s=5)
    before = host.get("job")
    time.sleep(1.7)
    later = host.get("job")
    assert later["count"] >= before["count"] + 2
    assert later["running"]
    healed.set()
    wait_for(lambda: host.get("job")["why"].startswith("restart 1 of 3"), timeout_s=5)
    assert (len(asked), leader._state.reached) == (2, 7)
    send(host, 1, 3, left="done")
    leader.close("the test is over")


def test_a_disk_that_refuses_has_brought_nothing() -> None:
    answers: list[int | OSError] = [3, OSError(116, "Stale file handle"), 9]

    def progress() -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    probe = ProgressProbe(progress, 5)
    assert [probe.ask() for _ in range(3)] == [3, 3, 9]


def test_a_claim_that_is_not_answered_is_made_again(tmp_path: Path) -> None:
    port = free_port()
    with hosting(port) as host:
        store = ControlStore.open(StorePlan("127.0.0.1", port, "a", False), print)
        store.has_host = False  # as where somebody else keeps the store
        agent = Place(store, Scratch(tmp_path), []).agent()
        agent._began_s -= 60
        host.send_signal(signal.SIGSTOP)
        agent._lead_if_nobody_does()
        assert agent._leader is None
        host.send_signal(signal.SIGCONT)
        agent._lead_if_nobody_does()
        assert agent._leader is not None
        agent._leader.close("the test is over")
