"""Trackers that fail, hang or are missing: the training is not touched, and the person is told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commands
import instep
from commands import TESTS, wait_for
from instep.core.errors import SpecError
from instep.core.trackers import TRACKERS, TrackerEntry, parse_trackers, require_trackers
from instep.launch import tracking
from instep.launch.tracker_process import TrackerProcess
from instep.launch.tracking import Tracking
from tasks import Small, made_up
from tracked import MadeUpLog, describe, expected, read_back

ODD = {"failing": "Failing", "hanging": "Hanging", "holding": "HoldingTheInterpreter", "leaving": "Leaving"}


@pytest.fixture(autouse=True)
def _odd_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in {**ODD, "lasting": "SlowToFinish"}.items():
        monkeypatch.setitem(TRACKERS, name, TrackerEntry(f"odd_trackers:{cls}"))
    monkeypatch.setattr(tracking, "EVERY_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "launch"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    describe(path)
    log = MadeUpLog(path)
    log.steps(1, 20)
    log.close()
    return path


def test_one_that_fails_or_hangs_is_named_once_and_the_others_go_on(run_dir: Path) -> None:
    said: list[str] = []
    with Tracking(run_dir, [*ODD, "csv"], said.append, hang_s=3.0):
        wait_for(lambda: len(said) == len(ODD), timeout_s=60)
    wrong = {line.split()[3]: line for line in said}
    assert "failed: ConnectionError: no route to the server. The training" in wrong["failing"]
    assert "it did not answer for 3 s." in wrong["hanging"]
    assert "it did not answer for 3 s." in wrong["holding"]
    assert "was ended with exit code 7." in wrong["leaving"]
    assert f"instep track {run_dir} --track hanging" in wrong["hanging"]
    assert "time.sleep" not in wrong["hanging"]
    assert "odd_trackers.py" in (run_dir / "trackers" / "hanging.log").read_text()  # where it hung
    assert read_back("csv", run_dir) == expected(run_dir)


def test_the_end_waits_for_a_bounded_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "QUIET_S", 2.5)
    said: list[str] = []
    with Tracking(run_dir, ["lasting"], said.append):
        wait_for(lambda: (run_dir / "trackers" / "lasting.json").exists())
        begun = time.monotonic()
    assert 2.5 <= time.monotonic() - begun < 10
    assert said[0] == "sending the rest to lasting: 60 s at most …"
    assert "it made no progress for 2 s after the end of the run" in said[1]
    assert len(said) == 2


def test_it_is_tried_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "RETRY_S", 0.1)
    said: list[str] = []
    with Tracking(run_dir, ["leaving"], said.append) as started:
        wait_for(lambda: said)
        process = started._trackers[0]
        wait_for(lambda: process.is_running)
    assert len(said) == 1


def test_a_training_does_not_notice(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "QUIET_S", 1.0)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "quiet": True}
    plain = instep.train(Small(), run_dir=str(tmp_path / "plain"), **options)
    tracked = instep.train(Small(), run_dir=str(tmp_path / "tracked"), track="hanging,failing,csv", **options)
    assert tracked.weights_sha256 == plain.weights_sha256
    assert [line.split()[3] for line in capfd.readouterr().err.splitlines()] in (
        ["failing", "hanging"],
        ["hanging", "failing"],
    )
    assert read_back("csv", tmp_path / "tracked") == expected(tmp_path / "tracked")
    assert "instep-trackers" not in {thread.name for thread in threading.enumerate()}


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with instep.start(run_dir=str(run_dir), track="csv", batch_size=8, epochs=2) as run:
        model, _ = run.prepare(nn.Linear(6, 3).double(), lambda params: torch.optim.SGD(params, lr=0.1))
        for step in run.steps(made_up(40)):
            for x, y in step.shards():
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.finish()
    numbers = read_back("csv", run_dir)
    assert numbers == expected(run_dir)
    assert [step for name, step in numbers if name == "train/loss"] == [*range(1, 11)]
    assert "weights_sha256" in (run_dir / "csv" / "result.csv").read_text()


def test_it_ends_when_its_parent_is_killed(run_dir: Path) -> None:
    """The process of a tracker sends what is in the log, and ends, also if a data worker holds its pipe open."""
    program = (
        "import os, sys, time; from pathlib import Path; from instep.launch.tracking import Tracking\n"
        "with Tracking(Path(sys.argv[1]), ['csv'], print):\n"
        "    os.fork()\n"
        "    time.sleep(1000)"
    )
    parent = subprocess.Popen([str(commands.BIN / "python"), "-c", program, str(run_dir)])
    wait_for(lambda: len(commands.descendants(parent.pid)) == 2)
    tracker, worker = sorted(commands.descendants(parent.pid))
    try:
        parent.kill()
        parent.wait()
        wait_for(lambda: not commands.is_alive(tracker))
    finally:
        os.kill(worker, signal.SIGKILL)
    assert read_back("csv", run_dir) == expected(run_dir)


def test_two_do_not_send_at_once(run_dir: Path) -> None:
    first = TrackerProcess(run_dir, "csv", 0.2, hang_s=60)
    first.start()
    wait_for(lambda: (run_dir / "csv").exists())
    second = TrackerProcess(run_dir, "csv", 0.0, hang_s=60)
    second.start()
    wait_for(lambda: second.poll() or not second.is_running)
    assert second.error == "another process is sending this run to it right now"
    third = TrackerProcess(run_dir, "csv", 0.2, hang_s=60)  # of a new command: it waits for the first
    third.start()
    third.ask_to_finish()
    first.ask_to_finish()
    wait_for(lambda: (first.poll(), third.poll()) and not first.is_running and not third.is_running)
    assert first.is_done
    assert third.is_done
    assert read_back("csv", run_dir) == expected(run_dir)


class TestRefused:
    def test_an_unknown_tracker(self) -> None:
        with pytest.raises(SpecError, match=r"'tensorbord' is not a tracker\. Did you mean tensorboard\? The trackers"):
            instep.TrainSpec(track="csv,tensorbord")
        with pytest.raises(SpecError, match="'' is not a tracker"):
            parse_trackers("csv,")
        with pytest.raises(SpecError, match="twice"):
            parse_trackers("csv, csv")

    def test_a_package_that_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["wandb"]._replace(package="no_such_package"))
        monkeypatch.chdir(tmp_path)
        advice = r"wandb is not installed.*pip install 'instep\[wandb\]'"
        with pytest.raises(SpecError, match=advice):
            instep.train(Small(), track="csv,wandb")
        with pytest.raises(SpecError, match=advice), instep.start(track="wandb"):
            pass
        assert [*tmp_path.iterdir()] == []  # nothing was started

    def test_a_folder_of_that_name_is_no_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["wandb"]._replace(package="no_such_package"))
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "no_such_package").mkdir()
        with pytest.raises(SpecError, match="not installed"):
            require_trackers(("wandb",))


def test_the_command(run_dir: Path) -> None:
    done = commands.run("instep", "track", str(run_dir), "--track", "csv", "--json", env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    (outcome,) = json.loads(done.stdout)["trackers"]
    assert outcome == {"name": "csv", "sent": True, "where": str(run_dir / "csv"), "error": None}
    assert read_back("csv", run_dir) == expected(run_dir)
    nothing = commands.run("instep", "track", str(run_dir.parent), "--track", "csv", "--json", env={"PYTHONPATH": ""})
    assert nothing.returncode == 2
    assert "has no events" in json.loads(nothing.stdout)["error"]
