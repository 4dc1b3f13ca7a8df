"""What is around the rules, without a process: how long to watch, suppression, files, reports, SARIF."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from instep.check import study
from instep.check.finding import Severity
from instep.check.observations import Observation, Observed
from instep.check.observe.agreement import Agreement, RankState, create_agreement
from instep.check.plan import Progress, WatchPlan
from instep.check.records.data import EvaluationSeen, SecondEpochSeen
from instep.check.records.run import Began, EvaluationBegan, OptimizerStepped, TrainingEpochBegan
from instep.check.result import CheckResult, Status
from instep.check.rules import RULES
from instep.check.sarif import to_sarif
from instep.check.seen import describe_seen
from instep.check.source.module import SourceModule
from instep.check.source.project import find_module, read_folder, read_project
from instep.check.suppression import suppress
from instep.check.task_file import defines_task
from instep.check.watched import Script
from instep.check.worlds import compare_worlds, merge_results
from instep.cli.check import worlds_to_compare
from instep.cli.check_report import show
from instep.core.errors import SpecError
from planted_rules import PrintRule, StepRule, finding, steps


class TestPlan:
    def test_enough_is_two_epochs_and_an_evaluation(self) -> None:
        plan = WatchPlan()
        assert not plan.is_enough(Progress(step=200, epochs=2, evaluated=True, seconds=30))
        assert not plan.is_enough(Progress(step=200, epochs=3, evaluated=False, seconds=30))
        assert not plan.is_enough(Progress(step=29, epochs=3, evaluated=True, seconds=30))
        assert not plan.is_enough(Progress(step=30, epochs=3, evaluated=True, seconds=5))
        assert plan.is_enough(Progress(step=30, epochs=3, evaluated=True, seconds=30))
        assert plan.is_enough(Progress(step=300))

    def test_steps_that_are_asked_for(self) -> None:
        plan = WatchPlan.parse(5, "10s")
        assert not plan.is_enough(Progress(4, 9, True))
        assert plan.is_enough(Progress(5))
        assert plan.time_s == 10

    @pytest.mark.parametrize(("steps", "time"), [(0, "2m"), (None, "soon"), (None, "0s")])
    def test_what_cannot_be_watched(self, steps: int | None, time: str) -> None:
        with pytest.raises(SpecError):
            WatchPlan.parse(steps, time)


class TestAgreement:
    """[Note: Leaving together]"""

    def ranks(self, folder: Path, num: int, plan: WatchPlan) -> list[Agreement]:
        create_agreement(folder / "a", num)
        return [Agreement(folder / "a", rank, plan) for rank in range(num)]

    def test_all_leave_at_the_same_step(self, tmp_path: Path) -> None:
        first, second = self.ranks(tmp_path, 2, WatchPlan(num_steps=3))
        for step in (1, 2):
            assert not first.advance(step, 1, False)
        assert not second.advance(1, 1, False)
        assert first.advance(3, 1, False)
        assert not second.advance(2, 1, False)
        assert second.advance(3, 1, False)

    def test_what_one_rank_sees_counts_for_all_and_nobody_is_passed_by(self, tmp_path: Path) -> None:
        first, second = self.ranks(tmp_path, 2, WatchPlan())
        assert not first.advance(40, 3, False, seconds=30)
        assert not second.advance(39, 3, True, seconds=30)  # enough; but the other may be beyond its 40th
        assert not second.advance(40, 3, True)
        assert first.advance(41, 3, False)
        assert second.advance(41, 3, True)

    def test_time_is_up_and_release(self, tmp_path: Path) -> None:
        first, second = self.ranks(tmp_path, 2, WatchPlan())
        first.advance(7, 1, False)
        second.ask()
        assert not second.advance(7, 1, False)
        assert second.advance(8, 1, False)
        second.set_state(RankState.WAITING)
        assert first.all_there
        assert not second.all_there
        first.release()
        assert second.is_released


SOURCE = """\
import torch
print(1)  # instep: ignore[prints] a tool for one process
# instep: ignore[prints] the same
print(
    2,
)
print(3)  # instep: ignore[prints]
print(4)  # instep: ignore[prnits] mistyped
x = 5  # instep: ignore[steps] nothing is here
"""


class TestSuppression:
    def judged(self, was_run: bool) -> tuple[list[int], list[str], list[str]]:
        module = SourceModule("train.py", SOURCE)
        left, suppressed, notices = suppress(PrintRule().read(module), [module], ["prints", "steps"], was_run)
        return [item.line for item in left], [item.reason for item in suppressed], notices

    def test_on_the_line_and_on_the_line_above(self) -> None:
        left, reasons, _ = self.judged(was_run=True)
        assert left == [7, 8]
        assert reasons == ["a tool for one process", "the same"]

    def test_without_reason_unknown_and_unused_are_named(self) -> None:
        _, _, (without, unknown, unused) = self.judged(was_run=True)
        assert "train.py:7" in without
        assert "no reason" in without
        assert "Nearest: prints" in unknown
        assert "train.py:9: ignore[steps] suppresses nothing" in unused

    def test_what_was_not_run_may_be_of_use_later(self) -> None:
        assert not any("suppresses nothing" in notice for notice in self.judged(was_run=False)[2])


class TestFiles:
    def project(self, folder: Path) -> Path:
        (folder / "pyproject.toml").write_text("")
        (folder / "tool").mkdir()
        texts = {
            "train.py": "import helper, torch\nfrom tool import part\nfrom tool.deep import x",
            "helper.py": "from other import *",
            "other.py": "1",
            "unused.py": "2",
            "tool/__init__.py": "from . import part",
            "tool/part.py": "from .deep import x",
            "tool/deep.py": "x = 3",
            "tool/__main__.py": "4",
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        return folder / "train.py"

    def test_what_a_script_imports_from_its_project(self, tmp_path: Path) -> None:
        script = self.project(tmp_path)
        names = [Path(module.path).relative_to(tmp_path).as_posix() for module in read_project(script)]
        assert names[0] == "train.py"
        assert sorted(names[1:]) == ["helper.py", "other.py", "tool/__init__.py", "tool/deep.py", "tool/part.py"]

    def test_what_a_run_imported(self, tmp_path: Path) -> None:
        script = self.project(tmp_path)
        imported = [str(tmp_path / "unused.py"), io.__file__, "/nowhere/else.py"]
        names = {Path(module.path).name for module in read_project(script, imported)}
        assert "unused.py" in names
        assert "io.py" not in names

    def test_names_are_those_of_the_observations(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A traceback has absolute names, through symbolic links as they were given."""
        (tmp_path / "real").mkdir()
        self.project(tmp_path / "real")
        (tmp_path / "link").symlink_to("real")
        monkeypatch.chdir(tmp_path / "link")
        imported = [str(tmp_path / "link" / "helper.py"), str(tmp_path / "real" / "helper.py")]
        names = [module.path for module in read_project(Path("train.py"), imported)]
        assert names[:2] == [f"{Path.cwd()}/train.py", str(tmp_path / "link" / "helper.py")]
        assert sum(name.endswith("helper.py") for name in names) == 1

    def test_folders(self, tmp_path: Path) -> None:
        self.project(tmp_path)
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / "site.py").write_text("1")
        (tmp_path / "broken.py").write_text("def")
        modules, notices = read_folder(tmp_path)
        assert len(modules) == 8
        assert "broken.py" in notices[0]

    def test_modules(self, tmp_path: Path) -> None:
        self.project(tmp_path)
        assert find_module("tool", tmp_path) == tmp_path / "tool" / "__main__.py"
        assert find_module("tool.part", tmp_path) == tmp_path / "tool" / "part.py"
        assert find_module("torch", tmp_path) is None

    def test_tasks(self, tmp_path: Path) -> None:
        assert defines_task(Path(__file__).parents[2] / "examples" / "digits.py")
        assert not defines_task(Path(__file__).parents[2] / "examples" / "plain_ddp.py")


class TestSeen:
    def test_what_was_seen_and_what_was_not(self) -> None:
        began = Began(world_size=2, script="train.py")
        epochs: list[Observation] = [TrainingEpochBegan(epoch=epoch) for epoch in (1, 2)]
        observed = Observed([[began, *steps(9), *steps(4, optimizer=1), *epochs], [began, *steps(9)]])
        watched, not_seen = describe_seen(observed, [StepRule()])
        assert watched == ["2 ranks", "on cpu", "9 optimizer steps", "2 epochs begun"]
        assert not_seen == ["a GPU", "an evaluation"]
        with_evaluation = Observed([[began, EvaluationBegan()], [began]])
        watched, not_seen = describe_seen(with_evaluation, [StepRule()])
        assert "an evaluation" in watched
        assert not_seen == ["an optimizer step", "an epoch of a DataLoader", "a GPU"]

    def test_nothing_is_said_twice(self) -> None:
        began = Began(world_size=1, script="train.py")
        epochs: list[Observation] = [TrainingEpochBegan(epoch=epoch) for epoch in (1, 2)]
        seen: list[Observation] = [began, *steps(9), *epochs, SecondEpochSeen(), EvaluationBegan()]
        watched, not_seen = describe_seen(Observed([seen]), RULES)
        assert watched[2:4] == ["9 optimizer steps", "2 epochs begun"]
        assert not {"an optimizer step", "a second epoch"} & {*watched, *not_seen}
        assert "an evaluation" in watched
        assert "an evaluation to its end" in not_seen
        watched, not_seen = describe_seen(Observed([[*seen, EvaluationSeen()]]), RULES)
        assert "an evaluation" not in watched
        assert "an evaluation to its end" in watched
        _, not_seen = describe_seen(Observed([[began]]), RULES)
        assert "an evaluation" in not_seen
        assert "an evaluation to its end" not in not_seen

    def test_processes_that_never_met(self) -> None:
        for group_size, number in ((1, 1), (2, 0)):
            alone: list[Observation] = [OptimizerStepped(optimizer=0, group_size=group_size)]
            end = study.WatchedEnd(Observed([alone] * 2), Status.COMPLETE)
            notices = study.judge_end(Script(__file__), end, [StepRule()], None).notices
            assert sum(notice.startswith("No rank joined") for notice in notices) == number


class TestWorlds:
    def run(self, ranks: int, epoch_steps: int, lr: float) -> Observed:
        epochs: list[Observation] = [TrainingEpochBegan(epoch=epoch, step=epoch * epoch_steps) for epoch in (0, 1)]
        made: list[Observation] = [OptimizerStepped(optimizer=0, lr=lr, step=step) for step in range(4)]
        return Observed([[*epochs, *made] for _ in range(ranks)])

    def test_a_batch_per_rank_is_another_recipe(self) -> None:
        (epochs, rates) = compare_worlds([self.run(1, 64, 0.1), self.run(2, 32, 0.1)])
        assert epochs.startswith("an epoch has 64 steps with 1 rank, 32 steps with 2 ranks: the global batch grows")
        assert rates == "the learning rate of the first 4 steps is the same"

    def test_a_rate_that_follows_the_number_of_processes(self) -> None:
        (epochs, rates) = compare_worlds([self.run(1, 64, 0.1), self.run(2, 64, 0.2)])
        assert epochs == "an epoch has 64 steps at any number of processes"
        assert rates == "the learning rate differs from step 1 on: 0.1 with 1 rank, 0.2 with 2 ranks"

    def test_findings_of_all_worlds_are_told_once(self) -> None:
        one = CheckResult(findings=[finding(), finding(line=2, severity=Severity.NOTE)], status=Status.COMPLETE)
        two = CheckResult(findings=[finding(line=3), finding()], status=Status.WATCHED, watched=["2 ranks"])
        merged = merge_results([one, two])
        assert [item.line for item in merged.findings] == [1, 3, 2]
        assert merged.status == Status.WATCHED

    def test_what_is_no_list_of_worlds(self) -> None:
        assert worlds_to_compare("2,1") == [1, 2]
        assert worlds_to_compare("") == []
        for text in ("2", "1,two", "0,1", ","):
            with pytest.raises(SpecError):
                worlds_to_compare(text)


class TestResult:
    def test_exit_codes(self) -> None:
        warned = CheckResult(findings=[finding(severity=Severity.WARNING)], status=Status.COMPLETE)
        assert warned.exit_code(Severity.ERROR) == 0
        assert warned.exit_code(Severity.WARNING) == 1
        assert warned.exit_code(Severity.NOTE) == 1
        assert warned.exit_code(None) == 0
        assert CheckResult(findings=[], status=Status.HUNG, failure_exit_code=3).exit_code(None) == 1
        assert CheckResult(findings=[], status=Status.FAILED, failure_exit_code=3).exit_code(None) == 3
        assert CheckResult(findings=[], status=Status.INTERRUPTED).exit_code(None) == 130

    def test_json_is_what_the_design_promises(self) -> None:
        result = CheckResult(findings=[finding(file="/project/train.py")], status=Status.WATCHED, watched=["2 ranks"])
        values = result.relative_to("/project").to_json(Severity.ERROR)
        assert {"findings", "watched", "not_seen", "status"} <= values.keys()
        (entry,) = values["findings"]
        assert {"rule", "severity", "file", "line", "message", "evidence", "fix", "docs"} <= entry.keys()
        assert (entry["severity"], entry["file"], entry["docs"]) == ("error", "train.py", "docs/check/steps.md")
        assert values["status"] == "watched"

    def test_the_report_groups_by_place(self) -> None:
        findings = [finding(), finding(line=9), finding(rule="prints", severity=Severity.NOTE)]
        result = CheckResult(findings=findings, status=Status.COMPLETE, watched=["2 ranks"], not_seen=["a GPU"])
        text = io.StringIO()
        show(result, Console(file=text, width=80))
        lines = text.getvalue().splitlines()
        assert [line for line in lines if line.startswith("train.py")] == ["train.py:1", "train.py:9"]
        assert lines[1] == "  error steps: It is wrong."
        assert lines[2:7] == ["    seen: 7 of 9", "    effect: Bad.", "    fix:", "      -a", "      +b"]
        assert lines[7] == "    docs/check/steps.md"
        assert lines[8] == "  note prints: It is wrong."
        assert lines[-3].endswith("2 errors, 1 note.")
        assert lines[-2:] == ["watched: 2 ranks", "not seen: a GPU"]


class TestStatic:
    def test_files_and_folders(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("print(1)\n")
        (tmp_path / "b.py").write_text("print(1)  # instep: ignore[prints] on purpose\n")
        result = study.check_source([tmp_path], [PrintRule()])
        assert [item.line for item in result.findings] == [1, 1]  # prints is no rule of RULES
        assert result.status == Status.STATIC
        assert "names no rule" in result.notices[0]

    def test_what_is_no_python(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="no Python file"):
            study.check_source([tmp_path])
        with pytest.raises(SpecError, match="neither a file"):
            study.check_source([tmp_path / "nothing"])

    def test_rules_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(study, "RULES", (PrintRule(), StepRule()))
        assert [rule.id for rule in study.choose_rules("", "prints")] == ["steps"]
        assert [rule.id for rule in study.choose_rules("prints", "")] == ["prints"]
        with pytest.raises(SpecError, match="Nearest: prints"):
            study.choose_rules("prnts", "")


def test_sarif_has_what_code_scanning_reads() -> None:
    findings = [finding(), finding(line=0, file="")]
    result = CheckResult(
        findings=findings, status=Status.FAILED, failure="rank 1 failed", not_seen=["a GPU"], files=["train.py"]
    )
    log = to_sarif(result, [StepRule()], exit_code=1)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["steps"]
    placed, unplaced = run["results"]
    location = placed["locations"][0]["physicalLocation"]
    assert location == {"artifactLocation": {"uri": "train.py", "uriBaseId": "SRCROOT"}, "region": {"startLine": 1}}
    assert unplaced["locations"][0]["physicalLocation"]["region"]["startLine"] == 1
    assert placed["level"] == "error"
    assert placed["ruleId"] == "steps"
    assert placed["partialFingerprints"] != unplaced["partialFingerprints"]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_two_kinds_of_observations_cannot_have_one_name() -> None:
    with pytest.raises(AssertionError):
        type(OptimizerStepped.__name__, (Observation,), {})
