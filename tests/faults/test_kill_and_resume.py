"""Killed at a random step on two processes, continued on three: the losses of the undisturbed run."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import TESTS, is_alive, pids_of, result_of, run, start, steps_in, wait_for
from instep.events.read import read_events

pytestmark = pytest.mark.timeout(120)
TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = (
    "--epochs",
    "3",
    "--batch-size",
    "10",
    "--seed",
    "9",
    "--save-every",
    "4",
    "--threads",
    "1",
    "--json",
)


@functools.cache
def undisturbed(folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    done = run("python", TASK, *OPTIONS, "pause_s=0.0", "--run-dir", folder)
    return result_of(done), steps_in(Path(folder))


# test_chaos.py kills the whole job, and compares the bits.
@pytest.mark.parametrize("victim", ["a worker", pytest.param("the whole job", marks=pytest.mark.slow)])
def test_continued_on_another_number_of_processes(victim: str, tmp_path: Path, tmp_path_factory: Any) -> None:
    expected, reference = undisturbed(str(tmp_path_factory.getbasetemp() / "undisturbed"))
    assert len(reference) == expected["steps"] == 33
    kill_at = random.Random(victim).randint(7, 25)
    first = start("instep", "train", TASK, *OPTIONS, "-n", "2", "--max-restarts", "0", "--run-dir", str(tmp_path))
    wait_for(lambda: len(steps_in(tmp_path)) >= kill_at, timeout_s=30)
    workers = pids_of(tmp_path, 2)
    os.kill(workers[1] if victim == "a worker" else first.pid, signal.SIGKILL)
    _, complaint = first.communicate(timeout=20)
    assert first.returncode == (3 if victim == "a worker" else -signal.SIGKILL), complaint
    wait_for(lambda: not any(map(is_alive, workers)), timeout_s=5)
    if victim == "a worker":
        # The launcher may end the other rank before that has noticed; if it has, it is no cause.
        first, *rest = [line for line in complaint.splitlines() if line.startswith("rank ")]
        assert first.startswith("rank 1: killed (SIGKILL)")
        lost = f"rank 0: rank 1 (pid {workers[1]}) has ended, while rank 0 "
        assert all(line.startswith(lost) and line.endswith("(lost its peer)") for line in rest), rest
        assert "Traceback" not in complaint
    lived = len(steps_in(tmp_path))
    assert lived < expected["steps"]
    assert not (tmp_path / "result.json").exists()

    lines = [len(re.findall("^samples", (tmp_path / "logs" / f"rank-{r}.log").read_text(), re.M)) for r in range(2)]
    # pause_s is a field of the Task, and with it part of the recipe; to go on, it must stay.
    actual = result_of(run("instep", "train", TASK, *OPTIONS, "-n", "3", "--run-dir", str(tmp_path)))
    assert actual["world_size"] == 3
    plan = [e for e in read_events(tmp_path) if e["event"] == "plan"][-1]
    saved = plan["first_step"]
    # The newest one; or it was killed while it saved that; or after it had, before the log had its last steps.
    assert saved in {lived - lived % 4 + early for early in (-4, 0, 4)}
    later = steps_in(tmp_path)[lived:]
    assert [e["step"] for e in later] == list(range(saved + 1, 34))
    assert [e["loss"] for e in later] == pytest.approx([e["loss"] for e in reference[saved:]], rel=1e-10)
    assert [e["lr"] for e in later] == [e["lr"] for e in reference[saved:]]
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-10)

    # No sample lost or repeated in the epoch that was cut in two.
    again = [samples_by_step_of_rank(tmp_path, rank, lines[rank] if rank < 2 else 0) for rank in range(3)]
    steps = [sorted({i for rank in again for i in rank[step]}) for step in range(33 - saved)]
    before = [
        sorted({i for rank in range(2) for i in samples_by_step_of_rank(tmp_path, rank, 0)[step]})
        for step in range(saved)
    ]
    whole = before + steps
    for epoch in range(3):
        assert sorted(i for step in whole[11 * epoch : 11 * epoch + 11] for i in step) == list(range(103))


def samples_by_step_of_rank(run_dir: Path, rank: int, skip: int) -> list[list[int]]:
    text = (run_dir / "logs" / f"rank-{rank}.log").read_text()
    return [list(map(int, line.split())) for line in re.findall(r"^samples (.+)$", text, re.M)][skip:]


@pytest.mark.slow  # test_restarts.py restarts the command, test_chaos.py compares the end
def test_a_killed_worker_is_restarted_and_the_end_is_the_same(tmp_path: Path, tmp_path_factory: Any) -> None:
    expected, _ = undisturbed(str(tmp_path_factory.getbasetemp() / "undisturbed"))
    job = start("instep", "train", TASK, *OPTIONS, "-n", "2", "--run-dir", str(tmp_path))
    wait_for(lambda: len(steps_in(tmp_path)) >= 9, timeout_s=30)
    os.kill(pids_of(tmp_path, 2)[0], signal.SIGKILL)
    out, err = job.communicate(timeout=40)
    import json

    actual = json.loads(out.strip().splitlines()[-1])
    assert job.returncode == 0, err
    assert actual["restarts"] == 1
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-10)


def test_a_rank_that_raises_is_shown_first(tmp_path: Path) -> None:
    job = start(
        "instep",
        "train",
        TASK,
        *OPTIONS,
        "-n",
        "3",
        "raise_at=3",
        "--max-restarts",
        "0",
        "--run-dir",
        str(tmp_path),
    )
    _, complaint = job.communicate(timeout=40)
    assert job.returncode == 1
    workers = pids_of(tmp_path, 3)
    assert len(workers) == 3
    wait_for(lambda: not any(map(is_alive, workers)), timeout_s=5)
    head, _, _ = complaint.partition("KeyError: 'sample 17'")
    assert "Traceback" in head
    assert "slow_task.py" in head
    assert "onnection" not in head
    assert "instep/launch" not in head
    assert len(steps_in(tmp_path)) == 2


@pytest.mark.slow  # tests/launch/test_launch.py has two launches at once
def test_two_trainings_at_once(tmp_path: Path) -> None:
    jobs = [start("instep", "train", TASK, *OPTIONS, "-n", "2", "--run-dir", str(tmp_path / name)) for name in "ab"]
    for job in jobs:
        _, err = job.communicate(timeout=50)
        assert job.returncode == 0, err
    assert steps_in(tmp_path / "a")[-1]["loss"] == steps_in(tmp_path / "b")[-1]["loss"]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    words = ("instep", "train", TASK, *OPTIONS, "-n", "2", "pause_s=0.6", "--run-dir", str(tmp_path))
    job = start(*words)
    wait_for(lambda: len(steps_in(tmp_path)) >= 2, timeout_s=30)
    second = run(*words)
    assert second.returncode == 2
    assert f"is in use: process {job.pid} trains there" in second.stderr
    job.terminate()  # it saves and leaves
    _, err = job.communicate(timeout=40)
    assert job.returncode == 0, err
    assert [e["event"] for e in read_events(tmp_path)].count("start") == 1
