"""Five kills and as many other numbers of processes: exact mode ends with the bits of one undisturbed process."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from commands import TESTS, pids_of, result_of, run, start, steps_in, wait_for

TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = (
    "--steps",
    "60",
    "--batch-size",
    "20",
    "--exact",
    "--shards",
    "6",
    "--save-every",
    "3",
    "--seed",
    "4",
    "--json",
)
PAUSE = "pause_s=0.004"


@pytest.mark.slow  # tests/verify/test_chaos.py kills and resizes in exact mode, too
@pytest.mark.timeout(180)
def test_killed_five_times_and_resized_each_time(tmp_path: Path) -> None:
    expected = result_of(run("instep", "train", TASK, *OPTIONS, PAUSE, "--run-dir", str(tmp_path / "alone")))
    assert expected["world_size"] == 1
    run_dir, chance = tmp_path / "killed", random.Random(11)
    reached = 0
    for world_size in (2, 1, 3, 2, 4):
        words = (*OPTIONS, PAUSE, "-n", str(world_size), "--max-restarts", "0", "--run-dir", str(run_dir))
        job = start("instep", "train", TASK, *words)
        reached += chance.randint(4, 8)
        wait_for(lambda goal=reached: any(e["step"] >= goal for e in steps_in(run_dir)), timeout_s=60)
        os.kill(chance.choice(pids_of(run_dir, world_size)), signal.SIGKILL)
        job.communicate(timeout=30)
        assert job.returncode == 3
        assert not (run_dir / "result.json").exists()
    actual = result_of(run("instep", "train", TASK, *OPTIONS, PAUSE, "-n", "3", "--run-dir", str(run_dir)))
    assert actual["weights_sha256"] == expected["weights_sha256"]
    assert actual["loss"] == expected["loss"]
    losses = {e["step"]: e["loss"] for e in steps_in(run_dir)}
    assert losses == {e["step"]: e["loss"] for e in steps_in(tmp_path / "alone")}
