"""The study of a search: rebuilt from its storage after every step, it decides what it would have decided."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from instep.core.errors import SpecError
from instep.tune.ledger import Ledger, storage_url
from instep.tune.named import make_pruner, make_sampler, pruner_names, sampler_names
from instep.tune.space import Choice, Range
from instep.tune.study import SearchStudy

SPACE = {
    "lr": Range("lr", 1e-5, 1e-1, log=True),
    "width": Range("width", 8, 64, is_int=True, step=8),
    "act": Choice("act", ("relu", "gelu")),
}
FINITE = {"width": SPACE["width"], "act": SPACE["act"]}
NUM_TRIALS, NUM_EVALUATIONS = 14, 5


def suggest(trial: Trial, space: dict[str, Any]) -> None:
    if "lr" in space:
        trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.suggest_int("width", 8, 64, step=8)
    trial.suggest_categorical("act", ("relu", "gelu"))


def accuracy(params: dict[str, Any], evaluation: int) -> float:
    lr = params.get("lr", 1e-2)
    return params["width"] / 64 + evaluation / 10 - abs(math.log10(lr) + 2) / 5 + (params["act"] == "gelu") / 20


class Searching:
    """A search without trainings: the study, and what each trial would measure."""

    storage: str | None = "journal"  # opened in milliseconds, and appended to by whole lines

    def __init__(self, folder: Path, sampler: str, pruner: str, space: dict[str, Any], dies: bool) -> None:
        self.folder, self.sampler, self.pruner, self.space, self.dies = folder, sampler, pruner, space, dies
        folder.mkdir()
        self.study = self.open()

    def open(self) -> SearchStudy:
        directions = [StudyDirection.MAXIMIZE]
        ledger = Ledger.open(storage_url(self.folder, self.storage), "it", directions, "id")
        make: Callable[[int], Any] = lambda n: make_sampler(self.sampler, 0, n, self.space)  # noqa: E731
        return SearchStudy("it", directions, ledger, make, lambda: make_pruner(self.pruner))

    def kill(self) -> None:
        """Forget everything, as a new process does; or nothing, where the search is undisturbed."""
        if self.dies:
            self.study = self.open()

    def run(self) -> list[Any]:
        while len(self.study.trials) < NUM_TRIALS and not self.study.is_exhausted:
            begun = self.study.next(lambda trial: suggest(trial, self.space))
            self.kill()
            state, values = self.judge(begun.number, begun.params)
            self.study.end(begun.number, state, values, {"sentence": "so"}, {"memory": -1.0})
            self.kill()
        return [
            (t.number, t.state, t.params, t.values, t.intermediate_values, t.user_attrs, t.system_attrs)
            for t in self.open().trials
        ]

    def judge(self, number: int, params: dict[str, Any]) -> tuple[TrialState, list[float] | None]:
        if number % 6 == 5:
            return TrialState.FAIL, None
        if self.dies:  # a first process evaluates a few times, perhaps decides to prune, and is killed
            for evaluation in range(1, 4):
                if self.study.evaluate(number, evaluation, accuracy(params, evaluation)):
                    break
            self.kill()
        for evaluation in range(1, NUM_EVALUATIONS + 1):
            if self.study.evaluate(number, evaluation, accuracy(params, evaluation)):
                return TrialState.PRUNED, None
        return TrialState.COMPLETE, [accuracy(params, NUM_EVALUATIONS)]


@pytest.mark.parametrize(
    ("sampler", "pruner", "space"),
    [
        ("tpe", "successivehalving", SPACE),
        ("tpe:multivariate=true,constant_liar=true", "hyperband", SPACE),
        ("random", "median:n_startup_trials=2", SPACE),
        ("qmc", "percentile:percentile=50.0,n_startup_trials=2", SPACE),
        ("nsgaii:population_size=4", "none", SPACE),
        ("grid", "none", FINITE),
        ("bruteforce", "none", FINITE),
    ],
)
def test_kills_change_nothing(tmp_path: Path, sampler: str, pruner: str, space: dict[str, Any]) -> None:
    """Killed after each proposal, within each trial and after it."""
    undisturbed = Searching(tmp_path / "undisturbed", sampler, pruner, space, dies=False).run()
    disturbed = Searching(tmp_path / "disturbed", sampler, pruner, space, dies=True).run()
    assert disturbed == undisturbed
    assert len(undisturbed) == NUM_TRIALS
    states = {trial[1] for trial in undisturbed}
    assert (TrialState.PRUNED in states) == (pruner != "none")
    assert len({str(trial[2]) for trial in undisturbed}) > NUM_TRIALS // 2


def test_a_grid_ends_when_all_was_tried(tmp_path: Path) -> None:
    small = {"width": Choice("width", (8, 16)), "act": SPACE["act"]}
    search = Searching(tmp_path / "it", "grid", "none", small, dies=True)
    for number in range(4):
        assert not search.study.is_exhausted
        begun = search.study.next(
            lambda t: (t.suggest_categorical("width", (8, 16)), t.suggest_categorical("act", ("relu", "gelu")))
        )
        search.study.end(number, TrialState.COMPLETE, [accuracy(begun.params, 1)])
        search.kill()
    assert search.study.is_exhausted
    assert len({str(trial.params) for trial in search.study.trials}) == 4


def test_a_sequence_of_points_is_optunas(tmp_path: Path) -> None:
    search = Searching(tmp_path / "it", "qmc", "none", SPACE, dies=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        theirs = optuna.create_study(sampler=optuna.samplers.QMCSampler(seed=0))
    for number in range(5):
        trial = theirs.ask()
        suggest(trial, SPACE)
        theirs.tell(trial, 0.0)
        begun = search.study.next(lambda trial: suggest(trial, SPACE))
        search.study.end(number, TrialState.COMPLETE, [0.0])
        search.kill()
        assert begun.params == trial.params or number == 0  # before the sequence begins, anything


def test_known_points_come_first(tmp_path: Path) -> None:
    search = Searching(tmp_path / "it", "tpe", "none", SPACE, dies=False)
    begun = search.study.next(lambda trial: suggest(trial, SPACE), {"lr": 1e-3, "width": 16})
    assert (begun.params["lr"], begun.params["width"]) == (1e-3, 16)


def test_a_trial_is_recorded_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill within the transaction leaves no trial, and the next process draws the same parameters."""
    monkeypatch.setattr(Searching, "storage", None)
    search = Searching(tmp_path / "it", "tpe", "none", SPACE, dies=True)
    storage = search.study._ledger.storage
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_set_trial_attr_without_commit", _die)
        with pytest.raises(KeyboardInterrupt):
            search.study.next(lambda trial: suggest(trial, SPACE))
    drawn = search.study.trials[0].params
    search.kill()
    assert search.study.trials == []
    assert search.study.next(lambda trial: suggest(trial, SPACE)).params == drawn


def _die(*_: Any) -> None:
    raise KeyboardInterrupt


def test_all_of_optunas_names() -> None:
    assert {"tpe", "random", "cmaes", "gp", "qmc", "grid", "bruteforce", "nsgaii", "nsgaiii"} <= set(sampler_names())
    assert {"median", "successivehalving", "hyperband", "percentile", "threshold", "wilcoxon"} <= set(pruner_names())
    assert isinstance(make_pruner("successivehalving:reduction_factor=3"), optuna.pruners.SuccessiveHalvingPruner)
    assert isinstance(make_pruner("none"), optuna.pruners.NopPruner)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_sampler("tpee", 0, 0, SPACE), "sampler='tpee' is unknown. Nearest: tpe"),
        (lambda: make_pruner("pbtt"), "pruner='pbtt' is unknown. Nearest: pbt"),
        (lambda: make_sampler("tpe:startup=3", 0, 0, SPACE), "tpe has no option 'startup'. It has consider_"),
        (lambda: make_sampler("grid", 0, 0, SPACE), "lr=1e-05..0.1:log has infinitely many"),
        (lambda: make_pruner("percentile"), "pruner='percentile'"),
        (lambda: make_pruner("successivehalving:reduction_factor=1"), "pruner='successivehalving:reduction_factor=1'"),
    ],
)
def test_names_that_are_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        make()
    assert sentence in str(refused.value)


def test_storages(tmp_path: Path) -> None:
    directions = [StudyDirection.MINIMIZE]
    for storage in (None, "journal", f"sqlite:///{tmp_path}/elsewhere.db"):
        url = storage_url(tmp_path, storage)
        Ledger.open(url, "it", directions, "id").close()
        assert Ledger.open(url, "it", directions, "id").trials() == []
        with pytest.raises(SpecError, match="already has a study it, which is not of this folder"):
            Ledger.open(url, "it", directions, "another")
    for url in ("sqlite:////nowhere/study.db", "nonsense", "mysql://localhost:1/x"):
        with pytest.raises(SpecError, match="cannot be opened"):
            Ledger.open(url, "it", directions, "id")
