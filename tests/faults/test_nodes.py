"""A node joins a run and leaves it: the run continues with the nodes that are there, on the same trajectory.

The nodes are two launchers on this machine: they share nothing but the rendezvous and the run directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from commands import TESTS, descendants, result_of, run, start, steps_in, wait_for
from instep.events.read import read_events
from ranks import free_port

TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = ["--steps", "90", "--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "--save-every", "3"]
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def world_sizes(run_dir: Path) -> list[int]:
    return [event["world_size"] for event in read_events(run_dir) if event["event"] == "start"]


@pytest.mark.slow  # tests/clusters/test_network.py does it with real hosts
@pytest.mark.timeout(180)
def test_a_node_joins_and_leaves(tmp_path: Path) -> None:
    alone = result_of(run("python", TASK, *OPTIONS, "--json", "pause_s=0.03", "--run-dir", str(tmp_path / "alone")))
    run_dir = tmp_path / "run"
    words = [
        *("instep", "train", TASK, *OPTIONS, "--json", "pause_s=0.03", "--run-dir", str(run_dir), "-n", "1"),
        *("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"),
        *("--rdzv-conf", QUICK),
    ]
    first = start(*words)
    wait_for(lambda: len(steps_in(run_dir)) >= 5, timeout_s=40)
    second = start(*words)
    wait_for(lambda: world_sizes(run_dir)[-1] == 2 and in_world(run_dir, 2) >= 8, timeout_s=60)
    for pid in [*descendants(second.pid), second.pid]:
        os.kill(pid, signal.SIGKILL)
    second.communicate()
    out, err = first.communicate(timeout=90)
    done = result_of(subprocess.CompletedProcess(words, first.returncode, out, err))
    assert world_sizes(run_dir)[:2] == [1, 2]
    assert world_sizes(run_dir)[-1] == 1
    reasons = [event["reason"] for event in read_events(run_dir) if event["event"] == "restart"]
    assert len(reasons) == len(world_sizes(run_dir)) - 1
    assert reasons[0].endswith("joined: all ranks continue from the newest checkpoint")
    assert done["weights_sha256"] == alone["weights_sha256"]


def in_world(run_dir: Path, world_size: int) -> int:
    """Return how many steps the newest attempt has made, if its world has this size."""
    events = list(read_events(run_dir))
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if events[starts[-1]]["world_size"] != world_size:
        return 0
    return sum(event["event"] == "step" for event in events[starts[-1] :])
