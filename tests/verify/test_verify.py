"""`instep verify` finds what differs, and nothing where nothing does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import planted
from commands import TESTS, run
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.train.source import TaskSource
from instep.verify.compare import Finding, Kind
from instep.verify.trials import plan_trials, verify

EXAMPLES = TESTS.parent / "examples"
PLANTED = TESTS / "verify" / "planted.py"
KILLED = "2, killed, then 1"


def findings(
    name: str, exact: bool = False, worlds: tuple[int, ...] = (1, 2), steps: int = 9, **more: Any
) -> list[Finding]:
    """Verify a Task of planted.py with batches that do not divide: two epochs and a bit."""
    task = getattr(planted, name)()
    batches = more or {"batch_size": 23}
    spec = TrainSpec(steps=steps, exact=exact, shards=5 if exact else None, threads=1, **batches)
    compared = verify(task, TaskSource.of_file(PLANTED, task), spec, worlds, lambda _: None)
    return list(compared.findings)


def failing(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.row, finding.run) for finding in findings if finding.kind is Kind.DIFFERENT}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sound_task_passes(exact: bool) -> None:
    actual = findings("Sound", exact, worlds=(1, 2, 3))
    assert failing(actual) == set()
    again = set() if exact else {"1 process"}
    assert {finding.run for finding in actual} == {"2 processes", "3 processes", "3, killed, then 2"} | again
    assert all(finding.kind is Kind.SAME for finding in actual if exact)
    if not exact:  # else there would be nothing to tolerate, and the limits would prove nothing
        assert {f.row for f in actual if f.kind is Kind.NEAR} >= {"loss trajectory", "gradients at step 1"}


@pytest.mark.timeout(120)
def test_batches_by_tokens_pass() -> None:
    actual = findings("ByTokens", exact=True, batch_tokens=150)
    assert {finding.run for finding in actual} == {"2 processes", KILLED}
    assert {f.row for f in actual if f.kind is Kind.SAME} >= {"sample order", "loss trajectory", "final weights"}
    assert all(finding.kind is Kind.SAME for finding in actual if finding.row != "evaluation metrics")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hidden_state_is_found_by_the_kill(exact: bool) -> None:
    actual = failing(findings("HiddenState", exact))
    assert ("loss trajectory", KILLED) in actual
    assert ("final weights", KILLED) in actual
    # Shards are more calls than steps, on fewer processes the more; so exact mode finds it without a kill, too.
    assert exact or {run for _, run in actual} == {KILLED}


@pytest.mark.timeout(120)
def test_the_command(tmp_path: Path) -> None:
    """A sound Task, and one with every mistake that a row is for; what a row finds is test_compare's."""
    words = ("--worlds", "1,2", "--steps", "6", "--json", "--threads", "1")
    same = run("instep", "verify", str(EXAMPLES / "digits.py"), "--exact", *words, cwd=tmp_path, timeout_s=60)
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["same"] is True
    assert "same bits" in same.stderr
    other = run("instep", "verify", f"{PLANTED}:EveryMistake", *words, cwd=tmp_path, timeout_s=60)
    assert other.returncode == 1, other.stderr
    assert re.search("different: .*loss trajectory", other.stderr)
    wrong = {(f["row"], f["run"]) for f in json.loads(other.stdout)["findings"] if f["kind"] == "different"}
    assert wrong >= {(row, "2 processes") for row in EVERY_ROW} | {("the same again", "1 process")}
    assert list(tmp_path.iterdir()) == []


EVERY_ROW = {
    "sample order",
    "learning rates",
    "loss trajectory",
    "gradients at step 1",
    "final weights",
    "ranks agree",
    "evaluation metrics",
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("SummedLoss", {"loss trajectory", "gradients at step 1", "final weights"}),
        ("RankNoise", {"loss trajectory", "gradients at step 1", "final weights"}),
        ("ItemsOfTheProcess", {"sample order"}),
        ("UnsyncedNorm", {"loss trajectory", "gradients at step 1", "final weights"}),
        ("TimeInForward", {"loss trajectory", "gradients at step 1"}),
        ("RankInForward", {"loss trajectory", "gradients at step 1", "final weights"}),
        ("LocalSchedule", {"learning rates", "final weights"}),
        ("LocalBuffer", {"ranks agree", "final weights"}),
    ],
)
def test_a_planted_mistake_is_found_in_its_row(name: str, rows: set[str]) -> None:
    actual = failing(findings(name))
    assert rows <= {row for row, run in actual if run == "2 processes"}
    if name != "ItemsOfTheProcess":  # whose processes may be alike by chance
        assert (("the same again", "1 process") in actual) == (name == "TimeInForward")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["RankInForward", "LocalSchedule", "ItemsOfTheProcess", "TimeInForward"])
def test_exact_mode_finds_them_too(name: str) -> None:
    assert failing(findings(name, exact=True))


def test_the_plan() -> None:
    spec = TrainSpec(steps=5, batch_size=16)
    assert [trial.worlds for trial in plan_trials([1, 2, 3], spec)] == [(1,), (1,), (2,), (3,), (3, 2)]
    exact = TrainSpec(steps=5, batch_size=16, exact=True)
    assert [trial.worlds for trial in plan_trials([2, 4], exact)] == [(2,), (4,), (4, 2)]
    for worlds in ([], [2, 2], [0, 1]):
        with pytest.raises(SpecError, match="different numbers of processes"):
            plan_trials(worlds, spec)
    with pytest.raises(SpecError, match="leave nothing to compare"):
        plan_trials([2], TrainSpec(steps=1, batch_size=16))
    with pytest.raises(SpecError, match="at most 16 processes"):
        plan_trials([1, 17], exact)
