"""A search from end to end: its trials, its files, and what is left of it after kills and failures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

import commands
import instep
import patience
from instep.core.errors import SpecError
from instep.monitor.page.runs import RunIndex
from instep.train.source import load_file

FILE = commands.TESTS / "tune" / "tunable.py"
TASK = f"{FILE}:Plain"
WORDS = (
    *("lr=1e-4..1:log", "hidden=4,16", "--batch-size", "8,16", "--trials", "5", "--metric", "accuracy:max"),
    *("--pruner", "median:n_startup_trials=1", "--epochs", "6", "-n", "2", "--exact", "--save-every", "3"),
)


def tune(folder: Path, *words: str) -> tuple[str, ...]:
    return ("instep", "tune", TASK, *(words or WORDS), "--run-dir", str(folder), "--json")


def study_of(folder: Path) -> list[Any]:
    """Everything that a study knows, but times."""
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{folder}/study.db")
    hashes = [trial.user_attrs.pop("weights_sha256", None) for trial in study.trials]
    trials = [(t.number, t.state, t.params, t.values, t.intermediate_values, t.system_attrs) for t in study.trials]
    study._storage.remove_session()
    study._storage._backend.engine.dispose()
    return [*zip(trials, hashes, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("tune") / "search"
    done = commands.run(*tune(folder), timeout_s=90)
    return folder, commands.result_of(done), done.stderr


@pytest.mark.timeout(100)
def test_a_search(undisturbed: tuple[Path, dict[str, Any], str]) -> None:
    folder, outcome, said = undisturbed
    assert outcome["status"] == "complete"
    trials = outcome["trials"]
    assert [trial["number"] for trial in trials] == list(range(5))
    assert {trial["state"] for trial in trials} == {"complete", "pruned"}, said
    complete = [trial for trial in trials if trial["state"] == "complete"]
    best = max(complete, key=lambda trial: trial["value"])
    assert outcome["best"]["value"] == best["value"]
    assert outcome["best"]["params"].keys() == {"lr", "hidden", "batch_size"}
    result = json.loads((Path(outcome["best"]["run_dir"]) / "result.json").read_text())
    assert result["metrics"]["accuracy"] == best["value"]
    assert len(study_of(folder)) == 5
    assert f"trial 5/5  {trials[4]['state']}" in said
    page = (folder / "report.html").read_text()
    assert "Plotly" in page
    assert "http-equiv" not in page
    assert page.count("<tr>") == 6
    assert "Parallel coordinate" in page
    assert {line["name"] for line in RunIndex([folder]).summaries()} == {f"trials/{n:04d}" for n in range(5)}


@pytest.mark.timeout(60)
def test_the_command_trains_the_best_again(undisturbed: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    _, outcome, said = undisturbed
    assert outcome["command"] in said
    done = commands.run(*shlex.split(outcome["command"]), "--run-dir", str(tmp_path / "again"), "--json", "--quiet")
    best = json.loads((Path(outcome["best"]["run_dir"]) / "result.json").read_text())
    assert commands.result_of(done)["weights_sha256"] == best["weights_sha256"]


def running_trial(folder: Path) -> Path | None:
    """Return the newest trial that has made a step and has no result."""
    trials = [path for path in sorted(folder.glob("trials/*")) if not (path / "result.json").exists()]
    return trials[-1] if trials and commands.steps_in(trials[-1]) else None


@pytest.mark.timeout(200)
def test_killed_and_continued(undisturbed: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    """The search is killed once, then a rank: no trial is lost or doubled, and the study is the undisturbed one."""
    folder = tmp_path / "search"
    process = commands.start(*tune(folder))
    commands.wait_for(lambda: running_trial(folder) is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    process = commands.start(*tune(folder))
    commands.wait_for(lambda: (folder / "trials" / "0001").exists() and running_trial(folder) is not None)
    trial = running_trial(folder)
    if trial is not None:
        kill_rank(trial, 1)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert study_of(folder) == study_of(undisturbed[0])


def kill_rank(trial: Path, rank: int) -> None:
    pids = commands.pids_of(trial, 2)
    if rank < len(pids):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pids[rank], signal.SIGKILL)


@pytest.mark.slow  # test_killed_and_continued and test_study.py guard the same, with two kills and without trainings
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_twenty_trials_and_five_kills(tmp_path: Path, seed: int) -> None:
    """Digits, two processes, pruned, killed at random moments: the search as a whole or one of its ranks."""
    digits = str(commands.ROOT / "examples" / "digits.py")
    space = ("lr=1e-5..1e-1:log", "hidden=16,64,128", "--batch-size", "64,128", "--trials", "20")
    how = (
        "--metric",
        "accuracy:max",
        "--pruner",
        "successivehalving",
        "--epochs",
        "3",
        "-n",
        "2",
        "--exact",
        "--save-every",
        "10",
    )
    words = ("instep", "tune", digits, *space, *how, "--seed", str(seed), "--json", "--run-dir")
    begun = time.monotonic()
    commands.result_of(commands.run(*words, str(tmp_path / "calm"), timeout_s=400))
    calm_s = time.monotonic() - begun
    rng, kills, folder = random.Random(seed), 0, tmp_path / "killed"
    while True:
        process = commands.start(*words, str(folder))
        while kills < 5:
            try:
                process.communicate(timeout=rng.uniform(0.04, 0.16) * calm_s / patience.PATIENCE)
                break
            except patience.subprocess.TimeoutExpired:
                kills += 1
            if rng.random() < 0.6:
                os.kill(process.pid, signal.SIGKILL)
                process.communicate(timeout=30)
                break
            if (trial := running_trial(folder)) is not None:
                kill_rank(trial, rng.randrange(2))
        else:
            process.communicate(timeout=400)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills == 5
    assert study_of(folder) == study_of(tmp_path / "calm")


@pytest.mark.timeout(120)
def test_trials_that_fail(tmp_path: Path) -> None:
    words = ("ending=well,crash,diverge,memory,hang", "--sampler", "grid", "--max-restarts", "0", "--hang-after", "3s")
    more = ("--trials", "9", "--metric", "accuracy:max", "--steps", "4", "--batch-size", "8", "--threads", "1")
    done = commands.run(
        *("instep", "tune", f"{FILE}:Faulty", *words, *more, "--run-dir", str(tmp_path / "s"), "--json"),
        timeout_s=110,
    )
    outcome = commands.result_of(done)
    ends = {trial["params"]["ending"]: (trial["state"], trial["sentence"]) for trial in outcome["trials"]}
    assert len(outcome["trials"]) == len(ends) == 5  # the grid has no more
    assert ends["well"] == ("complete", "")
    assert ends["crash"][0] == "failed"
    assert "RuntimeError: a bug of one's own" in ends["crash"][1]
    assert ends["diverge"][0] == "failed"
    assert "nan" in ends["diverge"][1]
    assert ends["memory"][0] == "infeasible"
    assert "out of memory" in ends["memory"][1]
    assert ends["hang"][0] == "failed"
    assert "sleep" in ends["hang"][1]
    assert outcome["best"]["params"] == {"ending": "well"}


@pytest.mark.timeout(120)
def test_interrupted_and_continued(tmp_path: Path) -> None:
    words = ("lr=0.01,0.1", "--sampler", "grid", "--metric", "accuracy:max", "--steps", "1000", "--eval-every", "500")
    words += ("--batch-size", "8", "--threads", "1")
    folder = tmp_path / "s"
    process = commands.start(*tune(folder, *words))
    commands.wait_for(lambda: running_trial(folder) is not None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    assert f"To continue: instep tune {TASK} lr=0.01,0.1" in err
    assert (folder / "trials" / "0000" / "checkpoints").exists()
    done = commands.result_of(commands.run(*tune(folder, *words), timeout_s=60))
    assert [trial["state"] for trial in done["trials"]] == ["complete"] * 2


@pytest.mark.timeout(100)
def test_from_a_program(tmp_path: Path) -> None:
    """A space of the Task's own, two metrics, a limit, a known point; two trials at once."""
    task = load_file(FILE).Conditional()
    point = {"lr": 0.01, "kind": "adam"}
    options = {"metric": "accuracy:max,num_parameters:min", "constraint": ["steps_are<=1"], "enqueue": [point]}
    with pytest.raises(SpecError, match=r"constraint=steps_are is never reported. Metrics of this Task: eval_loss"):
        instep.tune(task, trials=1, steps=4, batch_size=8, run_dir=str(tmp_path / "a"), **options)
    options["constraint"] = ["accuracy>=0", "num_parameters<=1e6"]
    more = {"trials": 4, "parallel": 2, "steps": 4, "run_dir": str(tmp_path / "b"), **options}
    assert instep.tune(task, {"batch_size": [8, 16]}, time="0s", **more).status == "out-of-time"
    result = instep.tune(task, {"batch_size": [8, 16]}, **more)
    assert [trial.state for trial in result.trials] == ["complete"] * 4
    assert {name: result.trials[0].params[name] for name in point} == point
    assert all(("momentum" in trial.params) == (trial.params["kind"] == "sgd") for trial in result.trials)
    assert result.best in result.front
    assert result.trials[0].values[1] == 83
    assert "Pareto" in (tmp_path / "b" / "report.html").read_text()
