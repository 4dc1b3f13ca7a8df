"""Trackers of a run whose ranks and commands are killed: every step once, none lost."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import commands
import instep
from instep.core.trackers import TRACKERS
from instep.launch.tracking import send_once
from tracked import expected, read_back, rounded

sys.path.insert(0, str(Path(__file__).parent))
from dying_task import Dying

# The small libraries protect the guarantee; the others have the same test, with every one of ten kills.
ALL = ",".join(TRACKERS)


@pytest.mark.parametrize(
    ("num_kills", "track"),
    [(3, "csv,tensorboard"), pytest.param(10, ALL, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_ranks_are_killed_and_restarted(num_kills: int, track: str, tmp_path: Path, capfd: Any) -> None:
    marks, run_dir = tmp_path / "marks", tmp_path / "run"
    marks.mkdir()
    options: dict[str, Any] = {"steps": 10 * num_kills + 10, "batch_size": 8, "processes": 2, "save_every": "5"}
    result = instep.train(
        Dying(marks=str(marks), num_kills=num_kills), run_dir=str(run_dir), track=track, quiet=True, **options
    )
    assert result.restarts == num_kills
    assert "the tracker" not in capfd.readouterr().err
    wanted = expected(run_dir)
    assert [step for name, step in wanted if name == "train/loss"] == [*range(1, options["steps"] + 1)]
    for name in track.split(","):
        numbers = read_back(name, run_dir)
        assert numbers == rounded(name, wanted), name
    lines = (run_dir / "csv" / "incidents.csv").read_text().splitlines()
    assert len([line for line in lines if ",restart," in line]) == num_kills


# Everything of a command is killed at once, its trackers too: monitor/test_trackers.py kills one while it sends.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_are_killed_with_all_their_processes(tmp_path: Path) -> None:
    run_dir, generator = tmp_path / "run", random.Random(1)
    words = ["instep", "train", str(Path(__file__).parent / "paced_tracked_task.py"), "-n", "2", "--steps", "400"]
    words += ["--batch-size", "8", "--save-every", "20", "--run-dir", str(run_dir), "--track", ALL, "--quiet"]
    for _ in range(10):
        before = len(commands.steps_in(run_dir))
        job = commands.start(*words)
        commands.wait_for(lambda: len(commands.steps_in(run_dir)) > before + 5 or job.poll() is not None, 60)  # noqa: B023
        time.sleep(generator.uniform(0.2, 4.0))
        for pid in [job.pid, *commands.descendants(job.pid)]:
            if commands.is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.communicate()
    done = commands.run(*words, timeout_s=200)
    assert done.returncode == 0, done.stderr
    for tracker in send_once(run_dir, [*TRACKERS], lambda _: None):  # what a busy machine had no time for
        assert tracker.is_done, tracker.error
    wanted = expected(run_dir)
    assert [step for name, step in wanted if name == "train/loss"] == [*range(1, 401)]
    for name in TRACKERS:
        assert read_back(name, run_dir) == rounded(name, wanted), name
