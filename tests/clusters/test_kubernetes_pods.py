"""The pods of a plain Job, run for real: they find each other, and train to the same bits through a preemption."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import TESTS, result_of, run, steps_in, wait_for
from pods import Pods

TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = ("--steps", "40", "--batch-size", "12", "--drop-last", "--exact", "--shards", "6", "pause_s=0.05")


def documents(folder: Path) -> list[dict[str, Any]]:
    """Have the command write a Job, and read it."""
    file = folder / "job.yaml"
    where = ("--image", "none:1", "--kind", "job", "--name", "slow", "--volume", "training:/mnt/data", "--nodes", "2")
    words = ("instep", "submit", "kubernetes", TASK, "--task-from-here", *OPTIONS, *where, "--write", str(file))
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.timeout(150)
def test_pods_find_each_other_and_their_successors_go_on(tmp_path: Path) -> None:
    claim, run_dir = tmp_path / "claim", tmp_path / "claim" / "runs" / "slow"
    claim.mkdir()
    with Pods(documents(tmp_path), {"training": claim}, tmp_path) as pods:
        for index in range(2):
            pods.start(index)
        alone = result_of(run("python", TASK, *OPTIONS, "--json", "--run-dir", str(tmp_path / "alone")))
        time.sleep(1)
        pods.publish()  # only now does DNS know the pods: also the first one had to wait for its own name
        wait_for(lambda: len(steps_in(run_dir)) >= 3, timeout_s=60)
        pods.terminate(1)
        ends = [pods.end(index) for index in range(2)]
        assert [code for code, _, _ in ends] == [143, 143], ends  # 0 would end the Job, and it is not done
        assert not (run_dir / "result.json").exists()
        assert list((run_dir / "checkpoints").glob("step-*"))
        for index in range(2):  # as the Job does, which ignores such ends
            pods.start(index)
        ends = [pods.end(index) for index in range(2)]
        assert [code for code, _, _ in ends] == [0, 0], ends
    result = json.loads((run_dir / "result.json").read_text())
    assert result["world_size"] == 2
    assert result["weights_sha256"] == alone["weights_sha256"]
