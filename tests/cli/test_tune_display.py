"""What a person sees of a search: lines where there is no terminal, a table on one."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from instep.cli.tune_display import TuneDisplay
from instep.core.metric_goal import MetricGoal
from instep.tune.result import TrialRecord, TuneResult

GOALS = (MetricGoal("metric", "accuracy"),)


def trial(number: int, state: Any, *values: float, sentence: str = "", wall_s: float | None = 10.0) -> TrialRecord:
    return TrialRecord(number, state, {"lr": 0.1 + number}, values, len(values), sentence, wall_s, f"s/{number}")


def result(*trials: TrialRecord) -> TuneResult:
    return TuneResult(GOALS, trials, "complete", "s", at_once=2)


def test_lines(capsys: Any) -> None:
    with TuneDisplay(5, is_quiet=False) as display:
        display.show(result(trial(0, "complete", 0.5), trial(1, "running", wall_s=None)))  # 0: of an earlier command
        display.show(result(trial(0, "complete", 0.5), trial(1, "failed", sentence="a bug\nand more")))
        display.show(result(trial(0, "complete", 0.5), trial(1, "failed"), trial(2, "complete", 0.75)))
    assert capsys.readouterr().err.splitlines() == [
        "searching in s",
        "trial 2/5  failed  lr=1.1  a bug  best 0  about 15s left",
        "trial 3/5  complete  accuracy 0.75  lr=2.1  best 2  about 10s left",
    ]


def test_a_table_has_the_best_first() -> None:
    display, out = TuneDisplay(5, is_quiet=False), io.StringIO()
    shown = display._table(
        result(trial(0, "failed", sentence="a bug"), trial(1, "complete", 0.5), trial(2, "complete", 0.75))
    )
    Console(file=out, width=80).print(shown)
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert "3/5 trials" in out.getvalue()
    assert [line[:3] for line in lines[-3:]] == [
        ["2", "complete", "0.75"],
        ["1", "complete", "0.5"],
        ["0", "failed", "0.1"],
    ]
    assert "a bug" in out.getvalue()


def test_nothing_when_quiet(capsys: Any) -> None:
    with TuneDisplay(5, is_quiet=True) as display:
        display.show(result(trial(0, "complete", 0.5)))
    assert capsys.readouterr().err == ""
