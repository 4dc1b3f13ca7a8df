"""Real runs with a planted bottleneck: the verdict names it first, and its rank. The whole campaign is a benchmark.

The machine of the tests may be busy, which the verdict says, too (`delayed`): the causes beside that are checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import commands
from instep.monitor.bottleneck.verdict import explain_run, open_log

TASK = commands.ROOT / "benchmarks" / "explain_task.py"


@pytest.mark.parametrize(
    ("words", "cause", "rank"),
    [
        ("-n 2 plant=collate_sleep seconds=0.15 rank=1 --data-workers 0", "input", 1),
        ("-n 2 plant=loss_sleep seconds=0.15 rank=0", "straggler", 0),
        ("plant=metric_sleep seconds=0.3 eval_samples=16 --eval-every 3", "evaluation", None),
    ],
)
def test_a_planted_bottleneck_is_named_first(tmp_path: Path, words: str, cause: str, rank: int | None) -> None:
    more = ["--steps", "12", "--batch-size", "16", "--threads", "1", "--quiet", "--run-dir", str(tmp_path / "run")]
    done = commands.run("instep", "train", str(TASK), *words.split(), *more)
    assert done.returncode == 0, done.stderr
    verdict = explain_run(open_log(tmp_path / "run"))
    first = next(cause for cause in verdict.causes if cause["kind"] != "delayed")
    assert (first["bounded_by"], first["rank"]) == (cause, rank), verdict


@pytest.mark.slow
def test_the_advice_is_tried_and_brings_about_what_was_predicted(tmp_path: Path) -> None:
    words = "plant=sample_sleep seconds=0.004 --data-workers 0 --steps 60 --batch-size 32 --threads 1 --quiet"
    done = commands.run("instep", "train", str(TASK), *words.split(), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    verdict = commands.result_of(
        commands.run("instep", "explain", str(tmp_path / "run"), "--try", "--json", timeout_s=150)
    )
    tried = verdict["tried"]
    assert tried["options"].startswith("--data-workers")
    assert tried["measured"] == pytest.approx(tried["predicted"], rel=0.2)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
