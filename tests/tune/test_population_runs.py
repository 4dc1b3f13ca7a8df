"""Population-based training with real trainings: copies of checkpoints, several at once, and kills."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import commands
from instep.cli.app import app
from instep.events.read import read_events
from instep.tune.ledger import Ledger

FILE = commands.TESTS / "tune" / "tunable.py"
WORDS = (
    *("lr=1e-3..1:log", "hidden=4,16", "--trials", "3", "--metric", "accuracy:max", "--pruner", "pbt"),
    *("--batch-size", "16", "--exact", "--save-every", "2", "--json", "--run-dir"),
)


def tune(folder: Path, *more: str, task: str = "Plain") -> tuple[str, ...]:
    return ("instep", "tune", f"{FILE}:{task}", *WORDS, str(folder), *more)


def trials_of(folder: Path, outcome: dict[str, Any]) -> list[Any]:
    """Everything that is known of the trials, but times and places."""
    trials = [{k: v for k, v in t.items() if k not in ("wall_s", "run_dir")} for t in outcome["trials"]]
    return [(trial, weights_of(folder / f"trials/{trial['number']:04d}")) for trial in trials]


def weights_of(run_dir: Path) -> str | None:
    path = run_dir / "result.json"
    return json.loads(path.read_text())["weights_sha256"] if path.exists() else None


@pytest.mark.timeout(100)
def test_a_population(tmp_path: Path, capsys: Any) -> None:
    """Two trials at once: the worst member is replaced by a copy of the best, which continues where that one paused."""
    folder = tmp_path / "s"
    done = commands.run(*tune(folder, "--epochs", "2", "--parallel", "2"), timeout_s=90)
    outcome = commands.result_of(done)
    trials = outcome["trials"]
    assert [trial["state"] for trial in trials].count("complete") == 3, done.stderr
    (replaced,) = (trial for trial in trials if trial["state"] == "pruned")
    copy = trials[3]
    origin = copy["copied_from"]
    source = trials[origin["trial"]]
    assert origin == {"trial": source["number"], "evaluation": 1, "replaces": replaced["number"]}
    assert replaced["sentence"] == "replaced after evaluation 1 by trial 3"
    assert copy["params"]["hidden"] == source["params"]["hidden"]
    assert copy["params"]["lr"] != source["params"]["lr"]
    steps = [event["step"] for event in read_events(Path(copy["run_dir"])) if event["event"] == "step"]
    assert steps == [5, 6, 7, 8], "four steps an epoch: the second epoch is its own"
    lrs = {event["lr"] for event in read_events(Path(copy["run_dir"])) if event["event"] == "step"}
    assert lrs == {copy["params"]["lr"]}
    assert json.loads((Path(copy["run_dir"]) / "fork.json").read_text())["step"] == 4
    ledger = Ledger.open(
        f"sqlite:///{folder}/study.db", "Plain", [], json.loads((folder / "search.json").read_text())["id"]
    )
    recorded = ledger.trials()
    ledger.close()
    assert list(recorded[3].intermediate_values) == [2], "the first evaluation is that of the trial it copies"
    assert list(recorded[source["number"]].intermediate_values) == [1, 2]
    with pytest.raises(SystemExit) as end:
        app(args=[*tune(folder, "--epochs", "2", "--trials", "5")[1:]])
    assert end.value.code == 2
    assert "population: 3 there, 5 now" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_continued(tmp_path: Path) -> None:
    """The search is killed at random moments, with another number of trials at once each time: the same to the bit."""
    words = ("--epochs", "4", "--sampler", "random", "pause_s=0.05")
    calm = tmp_path / "calm"
    expected = trials_of(calm, commands.result_of(commands.run(*tune(calm, *words, task="Paced"), timeout_s=300)))
    rng, folder, kills = random.Random(0), tmp_path / "killed", 0
    while kills < 5:
        process = commands.start(*tune(folder, *words, "--parallel", str(1 + kills % 2), task="Paced"))
        seen = steps_of(folder)
        wanted = seen + rng.randint(1, 8)
        commands.wait_for(lambda p=process, n=wanted: p.poll() is not None or steps_of(folder) >= n, timeout_s=100)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        kills += 1
    assert kills >= 3
    outcome = commands.result_of(commands.run(*tune(folder, *words, task="Paced"), timeout_s=300))
    assert trials_of(folder, outcome) == expected
    assert any(trial["copied_from"] for trial, _ in expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_share_a_population(tmp_path: Path) -> None:
    """Whoever is free trains a member; who copies whom does not depend on it."""
    words = ("--epochs", "3", "--sampler", "random", "--threads", "1", "pause_s=0.05")
    calm, folder = tmp_path / "calm", tmp_path / "shared"
    expected = trials_of(calm, commands.result_of(commands.run(*tune(calm, *words, task="Paced"), timeout_s=200)))
    shared = tune(folder, *words, "--storage", "journal", task="Paced")
    processes = [commands.start(*shared) for _ in range(2)]
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        outcomes.append(json.loads(out.splitlines()[-1]))
    assert [outcome["status"] for outcome in outcomes].count("complete") >= 1
    whole = next(outcome for outcome in outcomes if outcome["status"] == "complete")
    assert trials_of(folder, whole) == expected


def steps_of(folder: Path) -> int:
    return sum(len(commands.steps_in(trial)) for trial in folder.glob("trials/*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("lr=1..2", "--trials", "1"), "trials=1 with --pruner pbt is a population of one"),
        (("hidden=4,8",), "pruner=pbt changes fractional numbers in the course of a training, and none is searched"),
        (("lr=1..2", "--eval-every", "never"), "it compares trials by evaluations"),
        (("lr=1..2", "--pruner", "pbt:hyperparam_mutations=hidden"), "hidden cannot be changed in a training: it is"),
        (
            ("lr=1..2", "hidden=4,8", "--pruner", "pbt:hyperparam_mutations=hidden"),
            "hidden=4,8 are choices. Give a range of numbers",
        ),
        (
            ("lr=1..2", "--batch-size", "8..16", "--pruner", "pbt:hyperparam_mutations=batch_size"),
            "which samples a step has depends on it",
        ),
        (("lr=1..2", "--metric", "accuracy:max,wall_s:min"), "pruner=pbt compares one metric"),
        (("lr=1..2", "--gpus-per-trial", "0.5"), "gpus_per_trial=0.5 is for trials that Ray places. Add --on ray"),
        (("lr=1..2", "--on", "slurm"), "on='slurm' is unknown. Choose one of here, ray"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        app(args=["tune", f"{FILE}:Plain", "--pruner", "pbt", *words, "--run-dir", str(tmp_path / "s")])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert sentence in said
    assert not (tmp_path / "s" / "trials").exists()
