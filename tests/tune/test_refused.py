"""What `instep tune` refuses before anything starts, in one sentence and with exit code 2; limits and outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import commands
from instep.cli.app import app
from instep.core.errors import CheckpointError, SpecError
from instep.core.metric_goal import MetricGoal
from instep.tune.folder import SearchFolder
from instep.tune.objective import Constraint, check_names, read_goals
from instep.tune.result import TrialRecord, TuneResult

TASK = f"{commands.TESTS / 'tune' / 'tunable.py'}:Plain"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("lrr=1..2",), "Plain has no field 'lrr'. Nearest: lr."),
        (("lr=2..1",), "lr=2..1 is empty"),
        (("lr=0..1:log",), "a logarithm needs values above 0"),
        (("hidden=1.5..3",), "'1.5' is not a whole number, which this field holds"),
        (("hidden=a,b",), "hidden='a' is not a whole number"),
        (("hidden=8",), "there is nothing to search. Give a range or choices for a field of Plain"),
        (("lr=1..2", "--batch-size", "8..x"), "batch_size=8..x: 'x' is not a whole number"),
        (("lr=1..2", "--batch-size", "0"), "batch_size=0 is too small"),
        (("lr=1..2", "--metric", "accuracy"), "does not say whether more or less is better. Write accuracy:max"),
        (("lr=1..2", "--metric", "a:max,b:min", "--pruner", "asha"), "pruner=asha compares one metric"),
        (("lr=1..2", "--sampler", "grid"), "lr=1.0..2.0 has infinitely many"),
        (("lr=1..2", "--pruner", "ash"), "pruner='ash' is unknown."),
        (("lr=1..2", "--pruner", "asha:eta=1"), "pruner='asha:eta=1': eta must be at least 2"),
        (("lr=1..2", "--rung-processes", "1,2"), "rung_processes=1,2 is for --pruner asha"),
        (("--find", "lr", "--trials", "5"), "trials=5 is for a search, which --find is not"),
        (("--find", "lr", "--batch-size", "8,16"), "--find measures one setting, and batch_size is to be searched"),
        (("lr=1..2", "--time", "soon"), "time='soon' is not a time"),
        (("lr=1..2", "--trials", "0"), "trials=0 is too small"),
        (("lr=1..2", "--constraint", "memory"), "constraint='memory' is not a limit"),
        (("lr=1..2", "--enqueue", "hidden=3"), "'hidden=3' sets nothing that is searched (lr)"),
        (("lr=1..2", "--enqueue", "lr=3"), "lr=3.0 is not in lr=1.0..2.0"),
        (("lr=1..2", "--storage", "mysql://localhost:1/none"), "storage=mysql://localhost:1/none cannot be opened"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        app(args=["tune", TASK, *words, "--run-dir", str(tmp_path / "s")])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert sentence in said
    assert not (tmp_path / "s" / "trials").exists()


def test_a_folder_holds_one_search(tmp_path: Path) -> None:
    with SearchFolder.opened(tmp_path / "s", "it", False) as folder:
        first = folder.describe({"space": {"lr": "1..2"}, "seed": 0})
        with pytest.raises(CheckpointError, match="is in use"), SearchFolder.opened(tmp_path / "s", "it", False):
            pass
    with SearchFolder.opened(tmp_path / "s", "it", False) as folder:
        assert folder.describe({"space": {"lr": "1..2"}, "seed": 0}) == first
        with pytest.raises(CheckpointError, match=r"space lr: 1..2 there, 1..3 now\n  space x: none there, a,b now"):
            folder.describe({"space": {"lr": "1..3", "x": "a,b"}, "seed": 0})
    with SearchFolder.opened(tmp_path / "s", "it", True) as folder:
        assert folder.describe({"space": {}, "seed": 1}) != first
    assert (tmp_path / "s.old-1" / "search.json").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"holds no search\.json"),
        SearchFolder.opened(tmp_path / "other", "", True),
    ):
        pass


def test_limits() -> None:
    limit = Constraint.parse("memory_bytes <= 2e9")
    assert limit.violation({"memory_bytes": 3e9}) == 1e9
    assert Constraint.parse("accuracy>=0.5").violation({"accuracy": 0.75}) == -0.25
    assert str(limit) == "memory_bytes<=2e+09"
    goals = read_goals("accuracy:max,wall_s:min")
    check_names(goals, (limit,), {"accuracy": 1.0})
    with pytest.raises(SpecError, match=r"metric=accuracy is never reported\. Metrics of this Task: none"):
        check_names(goals, (), {})


def test_the_best_and_the_front() -> None:
    def trial(number: int, state: Any, *values: float) -> TrialRecord:
        return TrialRecord(number, state, {}, values, 0, "", None, "")

    goals = (MetricGoal("metric", "accuracy"), MetricGoal("metric", "size", True))
    trials = (
        trial(0, "complete", 0.9, 50),
        trial(1, "complete", 0.9, 40),
        trial(2, "complete", 0.8, 10),
        trial(3, "complete", 0.7, 20),
        trial(4, "infeasible", 1.0, 1),
        trial(5, "failed"),
    )
    result = TuneResult(goals, trials, "complete", "")
    assert [t.number for t in result.front] == [1, 2]
    assert result.to_json()["best"] == {"params": {}, "value": [0.9, 40], "run_dir": ""}
    assert [t.number for t in result.ranked()] == [0, 1, 2, 3, 4, 5]
    single = TuneResult(
        goals[:1], tuple(trial(n, "complete", v) for n, v in enumerate((0.5, 0.7, 0.7))), "complete", ""
    )
    assert single.best is not None
    assert single.best.number == 1
    assert TuneResult(goals, trials[4:], "complete", "").best is None
