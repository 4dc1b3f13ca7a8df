"""A run that comes further may fail for ever; one that does not is given up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commands import TESTS, result_of, run, wait_for
from instep.events.read import read_events
from instep.monitor.report.collect import collect

pytestmark = pytest.mark.timeout(120)
TASK = str(TESTS / "faults" / "fragile_task.py")
WORDS = ("instep", "train", TASK, "-n", "2", "--steps", "30", "--batch-size", "8", "--json", "--quiet")


def attempts(run_dir: Path) -> int:
    return [event["event"] for event in read_events(run_dir)].count("start")


def test_restarts_that_bring_progress_are_not_counted(tmp_path: Path) -> None:
    done = run(*WORDS, "--save-every", "2", "--max-restarts", "1", "--run-dir", str(tmp_path))
    assert result_of(done)["steps"] == 30
    assert attempts(tmp_path) >= 5
    assert "restart 2 of" not in done.stderr
    reasons = [event["reason"] for event in read_events(tmp_path) if event["event"] == "restart"]
    assert len(reasons) == attempts(tmp_path) - 1
    assert all(re.fullmatch(r"restart 1 of 1 after rank 0: killed \(SIGKILL\): .*", reason) for reason in reasons)
    incidents = [incident for incident in collect(tmp_path).incidents if incident.kind == "restart"]
    assert [incident.text for incident in incidents] == [f"{reason}, on 2 processes" for reason in reasons]
    assert "leaked" not in done.stderr
    logged = (tmp_path / "logs" / "rank-0.log").read_text()
    left = [Path("/dev/shm") / f"sem.{name}" for name in re.findall(r"semaphore /(\S+)", logged)]
    assert len(left) >= 5
    wait_for(lambda: not any(path.exists() for path in left))


def test_killed_again_and_again_without_progress(tmp_path: Path) -> None:
    done = run(*WORDS, "--save-every", "never", "--max-restarts", "2", "--run-dir", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert attempts(tmp_path) == 3
    assert "rank 0: killed (SIGKILL)" in done.stderr


def test_the_same_error_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    done = run(*WORDS, "raises=true", "--save-every", "never", "--max-restarts", "9", "--run-dir", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert attempts(tmp_path) == 2
    assert "failed the same way twice, without progress in between" in done.stderr
    failure = json.loads(done.stdout.splitlines()[-1])
    assert failure.pop("error").startswith("KeyError: 'sample 17'")
    assert failure == {"status": "failed", "rank": 0, "exit_code": 1}
