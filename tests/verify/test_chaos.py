"""A campaign of faults against a real training: nothing is lost; and a training that loses something is found."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from commands import ROOT, TESTS, run
from instep.cli.app import app
from instep.verify.faults import Kind, Moment, plan_faults

DIGITS = str(ROOT / "examples" / "digits.py")


def disturb(task: str, *words: str, timeout_s: float) -> tuple[int, dict[str, object], str]:
    done = run("instep", "verify", task, "--chaos", "--json", *words, timeout_s=timeout_s)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


ONCE_EACH = 17442
"""The seed of a script that begins with these, at every moment; all of them in one run."""
KINDS = {Kind.KILL_RANK, Kind.FLIP, Kind.KILL_JOB, Kind.PREEMPT, Kind.KILL_SUPERVISOR, Kind.DISK_FULL}


@pytest.mark.timeout(300)
def test_some_faults() -> None:
    faults = plan_faults(ONCE_EACH, len(KINDS))
    assert {fault.kind for fault in faults} == KINDS
    assert {fault.moment for fault in faults} == set(Moment)
    words = ("--faults", str(len(faults)), "--seed", str(ONCE_EACH), "--worlds", "1,2,3")
    code, actual, said = disturb(DIGITS, *words, timeout_s=290)
    assert (code, actual["same"], actual["complaints"]) == (0, True, []), said
    assert actual["faults"] == len(faults)
    assert all(kind.value in said for kind in KINDS), said


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_twenty_faults() -> None:
    code, actual, said = disturb(DIGITS, "--faults", "20", "--seed", "7", timeout_s=400)
    assert (code, actual["same"], actual["complaints"]) == (0, True, []), said
    assert actual["faults"] == 20
    assert all(kind.value in said for kind in Kind), said


def test_faults_without_chaos_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(args=["verify", DIGITS, "--faults", "5"])
    assert end.value.code == 2
    assert "Add --chaos" in capsys.readouterr().err


def leftovers() -> set[str]:
    """List what launches may leave on a machine: files in /dev/shm and /tmp, and ports that somebody listens on."""
    listening = {f"port {c.laddr.port}" for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    files = {str(path) for path in [*Path("/dev/shm").iterdir(), *Path(tempfile.gettempdir()).glob("instep-*")]}
    return listening | files


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("task", [DIGITS, str(TESTS / "verify" / "conv_task.py")])
def test_a_thousand_faults(task: str, seed: int) -> None:
    """A hundred for each seed and Task. A launch removes what a killed one has left, once that is a minute old."""
    before = leftovers()
    words = ("--faults", "100", "--seed", str(seed), "--worlds", "2,3,4")
    code, actual, said = disturb(task, *words, timeout_s=3500)
    assert (code, actual["same"], actual["faults"]) == (0, True, 100), said
    time.sleep(61)
    assert run("instep", "train", DIGITS, "-n", "2", "--steps", "1", "--run-dir", tempfile.mkdtemp()).returncode == 0
    assert leftovers() <= before


@pytest.mark.timeout(200)
@pytest.mark.slow  # test_verify.py::test_hidden_state_is_found_by_the_kill finds the same by one kill
def test_a_task_that_forgets_is_found(tmp_path: Path) -> None:
    """What it knows is in no checkpoint: after a kill it goes on otherwise."""
    assert plan_faults(45, 1)[0].kind is Kind.KILL_JOB
    code, actual, said = disturb(
        f"{TESTS / 'verify' / 'forgetful.py'}:Forgetful", "--faults", "1", "--seed", "45", timeout_s=190
    )
    assert (code, actual["same"]) == (1, False), said
    assert "ended with other weights" in said
