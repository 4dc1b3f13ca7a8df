"""A search that several processes share: no trial twice, none lost, one study."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

import commands
from instep.core.errors import CheckpointError, EnvironmentFailed
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.source import load_file
from instep.tune.claims import SharedClaims
from instep.tune.folder import SearchFolder
from instep.tune.ledger import Ledger, storage_url
from instep.tune.named import make_pruner, make_sampler
from instep.tune.plan import SearchPlan, TuneSpec
from instep.tune.space import Choice
from instep.tune.study import SearchStudy

FILE = commands.TESTS / "tune" / "tunable.py"


def study_in(folder: Path, sampler: str = "tpe:n_startup_trials=1") -> SearchStudy:
    """Open the shared study as one more process does."""
    directions = [StudyDirection.MAXIMIZE]
    ledger = Ledger.open(storage_url(folder, "journal"), "it", directions, "id")
    space = {"lr": Choice("lr", (0.1, 0.2, 0.3, 0.4))}
    return SearchStudy(
        "it", directions, ledger, lambda n: make_sampler(sampler, 0, n, space), lambda: make_pruner("median")
    )


def suggest(trial: Trial) -> None:
    trial.suggest_categorical("lr", (0.1, 0.2, 0.3, 0.4))


def test_processes_take_in_each_others_trials(tmp_path: Path) -> None:
    one, two = study_in(tmp_path), study_in(tmp_path)
    assert one.next(suggest).number == 0
    two.sync()
    assert two.next(suggest).number == 1
    one.evaluate(0, 1, 0.5)
    one.end(0, TrialState.COMPLETE, [0.7], {"sentence": "said"}, {"limit": 1.0})
    two.sync()
    seen, stored = two.trials[0], one.trials[0]
    for name in ("state", "values", "params", "intermediate_values", "user_attrs", "constraints"):
        assert getattr(seen, name) == getattr(stored, name), name
    assert [trial.number for trial in two.unfinished()] == [1]
    two.end(1, TrialState.FAIL)
    one.sync()
    assert one.unfinished() == []


def test_trials_that_locks_do_not_keep_apart_are_an_error(tmp_path: Path) -> None:
    one, two = study_in(tmp_path), study_in(tmp_path)
    one.next(suggest)
    with pytest.raises(EnvironmentFailed, match="trial 0 was recorded as trial 1"):
        two.next(suggest)


def test_a_grid_has_no_point_twice(tmp_path: Path) -> None:
    studies = [study_in(tmp_path, "grid") for _ in range(3)]
    for number in range(4):
        study = studies[number % 3]
        study.sync()
        study.next(suggest)
    assert len({trial.params["lr"] for trial in studies[0].trials}) == 4
    plan = SearchPlan(
        load_file(FILE).Plain(),
        FILE,
        TrainSpec(),
        TuneSpec(sampler="grid", points=({"lr": 0.1},)),
        {"lr": Choice("lr", (0.1, 0.2)), "hidden": Choice("hidden", (4, 8, 16))},
        0,
    )
    assert plan.num_trials == 7


def test_claims_and_the_folder(tmp_path: Path) -> None:
    one, two = SharedClaims(tmp_path), SharedClaims(tmp_path)
    assert one.take(3)
    assert one.take(3)
    assert not two.take(3)
    assert two.take(4)
    one.release(3)
    one.release(3)
    assert two.take(3)
    two.release(3)
    two.release(4)
    with SearchFolder.opened(tmp_path / "s", "it", False, is_shared=True) as folder:
        first = folder.describe({"seed": 0})
        with SearchFolder.opened(tmp_path / "s", "it", False, is_shared=True) as other:
            assert other.describe({"seed": 0}) == first
        with pytest.raises(CheckpointError, match="is in use"), SearchFolder.opened(tmp_path / "s", "it", False):
            pass
        with pytest.raises(CheckpointError, match="is in use"), SearchFolder.opened(tmp_path / "s", "it", True, True):
            pass


def starts_in(trial: Path) -> int:
    return sum(event["event"] == "start" for event in read_events(trial))


def running_in(folder: Path) -> list[Path]:
    """Return the trials that are in the middle of their training, and have saved."""
    trials = [path for path in folder.glob("trials/*") if not (path / "result.json").exists()]
    return [trial for trial in trials if any(trial.glob("checkpoints/step-*"))]


@pytest.mark.timeout(300)
def test_two_processes_one_is_killed(tmp_path: Path) -> None:
    """The other one continues the trial of the killed one from its checkpoint, and no trial runs twice."""
    folder = tmp_path / "s"
    how = ("--trials", "2", "--metric", "accuracy:max", "--steps", "60", "--save-every", "5", "--storage", "journal")
    words = ("instep", "tune", f"{FILE}:Paced", "lr=0.01..0.1", *how, "--threads", "1", "--run-dir", str(folder))
    killed, other = (commands.start(*words, "--json") for _ in range(2))
    commands.wait_for(lambda: len(running_in(folder)) == 2, timeout_s=60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    outcome = commands.result_of(end_of(other))
    assert outcome["status"] == "complete"
    assert [trial["state"] for trial in outcome["trials"]] == ["complete"] * 2
    trials = sorted(folder.glob("trials/*"))
    assert sorted(map(starts_in, trials)) == [1, 2]
    continued = max(trials, key=starts_in)
    events = list(read_events(continued))
    again = max(index for index, event in enumerate(events) if event["event"] == "start")
    assert next(event["step"] for event in events[again:] if event["event"] == "step") > 5
    assert (folder / "report.html").exists()


def end_of(process: Any) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
