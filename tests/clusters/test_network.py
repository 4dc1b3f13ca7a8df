"""Training over hosts in network namespaces: across them, and with a cable pulled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import TESTS, result_of, run
from hosts import connected_hosts
from instep.events.read import read_events

TASK = str(TESTS / "faults" / "slow_task.py")
RECIPE = ["--steps", "60", "--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "--save-every", "3"]
PORT = 29511


def command(run_dir: Path, *more: str, endpoint: str = f"h1:{PORT}", nnodes: str = "2") -> list[str]:
    words = ["instep", "train", TASK, *RECIPE, "--json", "--quiet", "--run-dir", str(run_dir), "-n", "1"]
    return [*words, "--nnodes", nnodes, "--rdzv-endpoint", endpoint, *more]


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def starts(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == "start"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return result_of(run("python", TASK, *RECIPE, "--json", "pause_s=0", "--run-dir", str(run_dir)))


@pytest.mark.timeout(120)
def test_two_hosts_train_as_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    run_dir = tmp_path / "run"
    with connected_hosts(2) as hosts:
        processes = [host.start(*command(run_dir, "pause_s=0")) for host in hosts]
        done = [finish(process) for process in processes]
    for each in done:
        assert result_of(each)["weights_sha256"] == alone["weights_sha256"]
        assert "the machines speak over veth0" in each.stderr, each.stderr
        assert "not over docker0" in each.stderr
    assert [event["world_size"] for event in starts(run_dir)] == [2]
    assert json.loads(done[0].stdout)["restarts"] == 0
