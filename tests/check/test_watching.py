"""Scripts under observation: they end together, leave nothing behind, and compute what they compute without it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import run
from instep.check.plan import WatchPlan
from instep.check.result import CheckResult, Status
from instep.check.study import check_script, check_worlds
from instep.check.watched import Script
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.script import run_script
from planted_rules import StepRule
from ranks import free_port

SCRIPTS = Path(__file__).parent / "scripts"


def check_odd(
    *argv: str,
    processes: int = 2,
    steps: int | None = 12,
    time_s: float = 60,
    hang_after: str = "1m",
    out: io.StringIO | None = None,
) -> CheckResult:
    spec = LaunchSpec(processes=processes, hang_after=hang_after)
    script = Script(str(SCRIPTS / "odd.py"), argv)
    return check_script(
        script, spec, WatchPlan(steps, time_s), io.StringIO() if out is None else out, io.StringIO(), [StepRule()]
    )


def left_in(folder: Path) -> list[str]:
    """Return the ranks, and what they have started, that work in a folder: their names are the ranks'."""
    names = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (process / "cwd").resolve() == folder.resolve():
                names.append((process / "comm").read_text().strip())
    return [name for name in names if name.startswith(("instep:", "pt_"))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run scripts in a folder of the test; no process of theirs is left."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert left_in(tmp_path) == []


class TestEnding:
    def test_nothing_of_the_script_runs_after_the_watch(self, tmp_path: Path) -> None:
        """Not even where it catches everything; and the step that is found is the user's line."""
        result = check_odd("swallow")
        assert result.status == Status.WATCHED
        assert result.watched[2] == "12 optimizer steps"
        assert list(tmp_path.iterdir()) == []
        (names,) = result.findings
        assert "optimizer.step()" in Path(names.file).read_text().splitlines()[names.line - 1]

    def test_a_crash_is_told_with_what_was_seen(self) -> None:
        result = check_odd("crash")
        assert result.status == Status.FAILED
        assert "ZeroDivisionError: rank 1 divides by zero" in result.failure
        assert "4 optimizer steps" in result.watched
        assert result.exit_code(None) == 1
        assert len(result.findings) == 1

    def test_ranks_with_different_numbers_of_steps(self) -> None:
        """Rank 1 gets to the last step alone, while rank 0 waits for it in a collective."""
        result = check_odd("alone")
        assert result.status == Status.WATCHED
        assert "the other ranks have left" in result.notices[0]

    def test_ranks_that_the_script_spawns(self) -> None:
        result = check_odd("spawn", str(free_port()), processes=1)
        assert result.status == Status.WATCHED
        assert result.watched[0] == "2 ranks"
        assert "12 optimizer steps" in result.watched

    # Slow: the first test has the same way out. What differs is how the launcher ends (launch/test_watch.py and
    # launch/test_launch.py guard it), and who writes.
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("way", "status", "code"),
        [
            ("exit", Status.FAILED, 1),
            ("killed", Status.FAILED, 3),
            ("stdin", Status.FAILED, 1),
            ("workers", Status.WATCHED, 0),
            ("fork", Status.WATCHED, 0),
        ],
    )
    def test_other_ways(self, way: str, status: Status, code: int) -> None:
        result = check_odd(way)
        assert (result.status, result.exit_code(None)) == (status, code)
        assert result.watched[2] == ("12 optimizer steps" if status == Status.WATCHED else "4 optimizer steps")

    @pytest.mark.slow  # the ranks' output is that of `instep run`, which launch/test_launch.py guards
    def test_a_million_lines(self) -> None:
        out = io.StringIO()
        result = check_odd("loud", out=out)
        assert (result.status, result.watched[2]) == (Status.WATCHED, "12 optimizer steps")
        numbers = [int(line.rpartition(" ")[2]) for line in out.getvalue().splitlines() if line[-1:].isdigit()]
        assert len(numbers) == 1_000_000
        assert sum(numbers) == 2 * sum(range(500_000))

    @pytest.mark.slow  # launch/test_watch.py finds hangs
    def test_a_hang_is_told_with_its_line(self) -> None:
        result = check_odd("hang", hang_after="5s")
        assert result.status == Status.HUNG
        assert "rank 1 is in odd.py:" in result.failure
        assert result.exit_code(None) == 1

    @pytest.mark.slow  # TestAgreement::test_time_is_up_and_release
    def test_a_loop_without_steps_ends_when_time_is_up(self) -> None:
        result = check_odd("endless", steps=None, time_s=10)
        assert result.status == Status.WATCHED
        assert "time was up" in result.notices[0]


@pytest.mark.slow  # test_world_training.py compares the same observations
def test_two_numbers_of_processes_are_compared() -> None:
    specs = [LaunchSpec(processes=processes) for processes in (1, 2)]
    script = Script(str(SCRIPTS / "noisy.py"))
    result = check_worlds(script, specs, WatchPlan(10**6), io.StringIO(), io.StringIO(), [StepRule()])
    epochs, samples, rates, differing = result.compared
    assert epochs.startswith("an epoch has 16 steps with 1 rank, 8 steps with 2 ranks")
    assert samples == "an epoch trains on the same 96 samples at any number of processes"
    assert rates == "the learning rate of the first 24 steps is the same"
    assert differing.startswith("the loss differs from step 1 on")
    assert differing.endswith("their first batches hold other samples")


def losses(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if " loss " in line)


def test_the_results_are_the_same_bits(tmp_path: Path) -> None:
    """Losses of every step, and weights and generators after the last one, as without check."""
    script, plain, watched = str(SCRIPTS / "noisy.py"), io.StringIO(), io.StringIO()
    spec = LaunchSpec(processes=2)
    logs = LogPlan(tmp_path / "logs", split=True)
    launch(LaunchJob(run_script, (script, [], False), spec, logs, stdout=plain, stderr=io.StringIO()))
    result = check_script(Script(script), spec, WatchPlan(10**6), watched, io.StringIO())
    assert result.status == Status.COMPLETE
    assert len(losses(plain.getvalue())) == 2 * 24
    assert sorted(plain.getvalue().splitlines()) == sorted(watched.getvalue().splitlines())


def test_the_command(tmp_path: Path) -> None:
    """Options, JSON as the last line, SARIF, exit codes; the script's output goes to standard error."""
    sarif = tmp_path / "check.sarif"
    words = ("-n", "2", "--steps", "6", "--json", "--sarif", str(sarif), str(SCRIPTS / "noisy.py"))
    done = run("instep", "check", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["status"] == "watched"
    assert values["exit_code"] == 0
    assert "6 optimizer steps" in values["watched"]
    assert len(losses(done.stderr)) == 2 * 5  # the sixth is printed after the step
    assert json.loads(sarif.read_text())["runs"][0]["invocations"][0]["executionSuccessful"]
    assert sorted(os.listdir(tmp_path)) == ["check.sarif"]
