"""A campaign of faults against a real training: nothing is lost; and a training that loses something is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import ROOT, TESTS, run

DIGITS = str(ROOT / "examples" / "digits.py")


def disturb(task: str, *words: str, timeout_s: float) -> tuple[int, dict[str, object], str]:
    done = run("instep", "verify", task, "--chaos", "--json", *words, timeout_s=timeout_s)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.timeout(420)
@pytest.mark.parametrize("count", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_some_faults(count: int) -> None:
    code, found, said = disturb(DIGITS, "--faults", str(count), "--seed", "7", timeout_s=400)
    assert (code, found["same"], found["complaints"]) == (0, True, []), said
    assert found["faults"] == count
    kinds = ("SIGSTOP of a rank", "a bit flipped", "disk full", "SIGKILL of the supervisor", "SIGTERM")
    assert sum(kind in said for kind in kinds) >= (len(kinds) if count == 20 else 3), said


def test_faults_without_chaos_are_refused() -> None:
    done = run("instep", "verify", DIGITS, "--faults", "5")
    assert done.returncode == 2
    assert "Add --chaos" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_faults() -> None:
    code, found, said = disturb(DIGITS, "--faults", "100", "--seed", "11", timeout_s=3500)
    assert (code, found["same"], found["faults"]) == (0, True, 100), said


@pytest.mark.timeout(200)
def test_a_task_that_forgets_is_found(tmp_path: Path) -> None:
    """What it knows is in no checkpoint: after a kill it goes on otherwise."""
    code, found, said = disturb(
        f"{TESTS / 'verify' / 'forgetful.py'}:Forgetful", "--faults", "3", "--seed", "1", timeout_s=190
    )
    assert (code, found["same"]) == (1, False), said
    assert "ended with other weights" in said
