"""A search that several processes share: no trial twice, none lost, one study."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

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
from instep.tune.local_place import LocalPlace
from instep.tune.named import make_pruner, make_sampler
from instep.tune.packing import TrialLoad
from instep.tune.plan import SearchPlan, TuneSpec
from instep.tune.result import TuneResult
from instep.tune.search import Search
from instep.tune.space import Choice, Range
from instep.tune.study import SearchStudy
from instep.tune.trial_run import Evaluation, RunningTrial, TrialPlan

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


class Pretended(RunningTrial):
    """A trial without a training: it evaluates once whenever it is looked at, and continues where it was stopped."""

    num_evaluations = 9
    reached: ClassVar[dict[int, int]] = {}
    running: ClassVar[set[int]] = set()

    def __init__(self, plan: TrialPlan, wake: Callable[[], object]) -> None:
        super().__init__(plan)
        assert plan.number not in self.running, f"trial {plan.number} runs twice"
        self.running.add(plan.number)
        (plan.run_dir / "events").mkdir(parents=True, exist_ok=True)
        (plan.run_dir / "events" / "rank-0.jsonl").touch()
        self.wake, self.seen, self.is_asked = wake, 0, False
        self.evaluations: Any = self
        self.load = TrialLoad(1)

    def poll(self) -> Iterator[Evaluation]:
        self.wake()
        number = self.plan.number
        if not self.is_asked:
            self.reached[number] = min(self.reached.get(number, 0) + 1, self.num_evaluations)
        while self.seen < self.reached[number]:
            self.seen += 1
            yield Evaluation(self.seen, self.seen, {"accuracy": number / 10})

    def is_done(self) -> bool:
        return self.is_asked or self.seen == self.num_evaluations

    def result(self) -> dict[str, Any]:
        self.running.discard(self.plan.number)
        status = "complete" if self.seen == self.num_evaluations else "preempted"
        metrics = {"accuracy": self.plan.number / 10}
        return {"status": status, "metrics": metrics, "loss": 0.0, "wall_s": 0.0, "weights_sha256": "", "steps": 9}

    def stop(self) -> None:
        self.is_asked = True

    def kill(self) -> None:
        raise AssertionError("nothing is left running")


class PretendedPlace(LocalPlace):
    """Where they run."""

    def start(self, plan: TrialPlan, wake: Callable[[], object]) -> RunningTrial:
        return Pretended(plan, wake)


@pytest.mark.timeout(60)
def test_processes_promote_each_others_trials(tmp_path: Path) -> None:
    """Three searches in threads: the rungs are those of one search, and no trial is continued twice at once."""
    Pretended.reached.clear()
    space = {"lr": Range("lr", 0.1, 0.2)}
    tune = TuneSpec(trials=9, metric="accuracy:max", pruner="asha:eta=3", sampler="random", storage="journal")
    plan = SearchPlan(load_file(FILE).Plain(), FILE, TrainSpec(steps=9), tune, space, 0)
    results: list[TuneResult] = []

    def search() -> None:
        with SearchFolder.opened(tmp_path / "s", "it", False, is_shared=True) as folder:
            results.append(Search(plan, folder, lambda _: None, PretendedPlace(plan.spec, 1)).run())

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert {result.status for result in results} <= {"complete", "running"}
    trials = next(result.trials for result in results if result.status == "complete")
    assert sorted({trial.state for trial in trials}) == ["complete", "pruned"]
    reached = sorted((trial.num_evaluations for trial in trials), reverse=True)
    assert len(reached) == 9
    assert reached[0] == 9
    assert 3 <= sum(count >= 3 for count in reached) < 9
    assert trials[8].num_evaluations >= 3  # the best of all, whoever trained it
    assert {trial.number: trial.num_evaluations for trial in trials} == Pretended.reached  # nothing was begun in vain
    assert not Pretended.running


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


@pytest.mark.timeout(120)
def test_asked_to_leave_before_it_has_begun(tmp_path: Path) -> None:
    """As a job of SLURM that is requeued: the outcome says so, whenever the signal comes."""
    words = ("lr=0.01..0.1", "--trials", "2", "--storage", "journal", "--run-dir", str(tmp_path / "s"), "--json")
    process = commands.start("instep", "tune", f"{FILE}:Paced", *words)
    commands.wait_for(lambda: handles_usr1(process.pid))
    process.send_signal(signal.SIGUSR1)
    outcome = commands.result_of(end_of(process))
    assert (outcome["status"], outcome["trials"]) == ("preempted", [])


def handles_usr1(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def end_of(process: Any) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
