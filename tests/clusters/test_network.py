"""Training over hosts in network namespaces: across them, with a cable pulled, and with a host that comes later."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import patience
from commands import TESTS, result_of, run, wait_for
from hosts import connected_hosts
from instep.events.read import read_events

TASK = str(TESTS / "clusters" / "paced_task.py")
RECIPE = ["--steps", "60", "--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "--save-every", "3"]
PORT = 29511


class Training:
    """One training, on any number of hosts, whose speed can be set."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._pace = folder / "pace"

    def pace(self, seconds: float) -> None:
        part = self._pace.with_suffix(".part")
        part.write_text(str(seconds))
        os.replace(part, self._pace)

    def command(self, *more: str, nnodes: str) -> list[str]:
        words = ["instep", "train", TASK, *RECIPE, f"pace={self._pace}", "--json", "--quiet", "-n", "1"]
        return [*words, "--run-dir", str(self.run_dir), "--nnodes", nnodes, "--rdzv-endpoint", f"h1:{PORT}", *more]

    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["event"] == "start"]

    def world_size(self) -> int:
        starts = self.starts()
        return starts[-1]["world_size"] if starts else 0

    def steps(self) -> int:
        """How many steps the newest world has made."""
        names = [event["event"] for event in self._events()]
        return names[len(names) - names[::-1].index("start") :].count("step") if "start" in names else 0

    def wait_for(self, world_size: int, steps: int, timeout_s: float = 90) -> None:
        """Wait until a world of that size has made so many steps."""
        deadline = time.monotonic() + timeout_s * patience.PATIENCE
        while self.world_size() != world_size or self.steps() < steps:
            seen = f"worlds {[event['world_size'] for event in self.starts()]}, {self.steps()} steps in the last"
            assert time.monotonic() < deadline, f"waited in vain for {steps} steps of {world_size}: {seen}"
            time.sleep(0.05)

    def _events(self) -> list[dict[str, Any]]:
        return list(read_events(self.run_dir)) if self.run_dir.exists() else []


@pytest.fixture
def training(tmp_path: Path) -> Training:
    made = Training(tmp_path)
    made.pace(0)
    return made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "pace").write_text("0")
    words = ["python", TASK, *RECIPE, "--json", f"pace={folder / 'pace'}", "--run-dir", str(folder / "run")]
    return result_of(run(*words))


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow  # the next test has it, with three hosts
@pytest.mark.timeout(120)
def test_two_hosts_train_as_one_process(training: Training, alone: dict[str, Any]) -> None:
    with connected_hosts(2) as hosts:
        processes = [host.start(*training.command(nnodes="2")) for host in hosts]
        done = [finish(process) for process in processes]
    for number, each in enumerate(done, 1):
        result = result_of(each)
        assert result["weights_sha256"] == alone["weights_sha256"]
        assert (result["restarts"], result["world_size"]) == (0, 2)
        assert f"the nodes communicate over veth0 (10.77.0.{number}), not over docker0" in each.stderr
    assert {event["host"] for event in training.starts()} == {"h1"}


@pytest.mark.timeout(240)
def test_a_host_joins_is_cut_for_a_moment_and_then_for_good(training: Training, alone: dict[str, Any]) -> None:
    words = training.command("--rdzv-conf", "last_call_timeout=1", nnodes="1:3")
    training.pace(0.2)
    with connected_hosts(3) as (first, second, third):
        processes = [host.start(*words) for host in (first, second)]
        training.wait_for(world_size=2, steps=2)
        late = third.start(*words)
        training.wait_for(world_size=3, steps=2)
        before = len(training.starts())
        third.cut()
        time.sleep(4)
        reached = training.steps()
        third.heal()
        training.wait_for(world_size=3, steps=reached + 2, timeout_s=20)
        assert len(training.starts()) == before, "a cut of four seconds restarted the ranks"
        third.cut()
        cut_s = time.monotonic()
        training.wait_for(world_size=2, steps=1, timeout_s=30)
        went_on_s = time.monotonic() - cut_s
        training.pace(0)
        done = [finish(process) for process in processes]
        lost = finish(late)
    for number, each in enumerate(done, 1):
        result = result_of(each)
        assert result["weights_sha256"] == alone["weights_sha256"]
        assert result["world_size"] == 2
        assert f"veth0 (10.77.0.{number})" in each.stderr
        assert "h3 joined: all ranks continue from the newest checkpoint" in each.stderr
        assert "h3 (rank 2) has sent no heartbeat for 10 s: the node or its network is down" in each.stderr
    assert went_on_s < 30
    assert lost.returncode == 3, lost.stderr
    assert "the nodes communicate over veth0 (10.77.0.3)" in lost.stderr  # it joined late
    assert f"h1, which hosts the rendezvous at h1:{PORT}, has not answered h3" in lost.stderr
    assert "The same command, on all nodes, continues from the newest checkpoint." in lost.stderr


@pytest.mark.timeout(180)
def test_the_host_of_the_rendezvous_is_cut(training: Training, alone: dict[str, Any]) -> None:
    training.pace(0.2)
    words = training.command("--rdzv-conf", "last_call_timeout=60", nnodes="1:2")
    with connected_hosts(2) as (first, second):
        leading, led = first.start(*words), second.start(*words)
        training.wait_for(world_size=2, steps=2)
        first.cut()
        cut_s = time.monotonic()
        ended = finish(led, 60)
        took_s = time.monotonic() - cut_s
        training.pace(0)
        done = finish(leading, 60)
    assert ended.returncode == 3, ended.stderr
    assert "The ranks here are ended" in ended.stderr
    assert "instep: h1, which hosts the rendezvous at" in ended.stderr
    assert "continues from the newest checkpoint" in ended.stderr
    assert took_s < 60
    result = result_of(done)  # it may go on alone, and does
    assert (result["weights_sha256"], result["world_size"]) == (alone["weights_sha256"], 1)


@pytest.mark.timeout(120)
def test_a_blocked_way_is_named_before_training(training: Training) -> None:
    with connected_hosts(2) as (first, second):
        second.refuse(first, but=PORT)
        processes = [host.start(*training.command(nnodes="2")) for host in (first, second)]
        wait_for(lambda: any(process.poll() is not None for process in processes), timeout_s=90)
        done = [finish(process) for process in processes]
    for each in done:
        assert each.returncode == 3, each.stderr
        assert "h1 (10.77.0.1) cannot reach h2 (10.77.0.2) on port " in each.stderr
        assert ": timed out. Open all ports between the nodes" in each.stderr
        assert "restart" not in each.stderr
    assert training.starts() == []


@pytest.mark.timeout(120)
def test_ranks_without_a_launcher_notice_a_pulled_cable(training: Training) -> None:
    training.pace(0.1)
    more = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    words = training.command(nnodes="2")
    own = ["python", *words[2 : words.index("--nnodes")], "--lost-after", "6s"]
    with connected_hosts(2) as hosts:
        processes = [host.start(*own, env={**more, "RANK": str(rank)}) for rank, host in enumerate(hosts)]
        training.wait_for(world_size=2, steps=2)
        hosts[1].cut()
        cut_s = time.monotonic()
        done = [finish(process, 60) for process in processes]
        took_s = time.monotonic() - cut_s
    assert took_s < 30
    assert all(each.returncode != 0 for each in done)
    assert any("imed out" in each.stderr for each in done), done[0].stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_fixed_number_of_machines_waits_for_the_one_that_was_cut(training: Training, alone: dict[str, Any]) -> None:
    words = training.command("--lost-after", "15s", nnodes="2")
    training.pace(0.1)
    with connected_hosts(2) as (first, second):
        processes = [host.start(*words) for host in (first, second)]
        training.wait_for(world_size=2, steps=2)
        before = len(training.starts())
        second.cut()
        time.sleep(19)
        second.heal()
        wait_for(lambda: len(training.starts()) > before, timeout_s=60)
        training.pace(0)
        done = [finish(process) for process in processes]
    for each in done:
        assert result_of(each)["weights_sha256"] == alone["weights_sha256"]
        assert result_of(each)["world_size"] == 2
    assert "1 of 2 are here (h1)" in done[0].stderr
    assert "h1, which hosts the rendezvous" in done[1].stderr
    assert "The ranks here are ended" in done[1].stderr
