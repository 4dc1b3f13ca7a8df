"""The study as it is stored: what a search knows after any kill, and what optuna-dashboard opens."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from instep.core.errors import SpecError

JOURNAL = "journal"
_OWNER = "instep:search"


class Ledger:
    """A study in a storage, written in steps that a kill cannot tear."""

    def __init__(self, storage: BaseStorage, study_id: int) -> None:
        self.storage = storage
        self._study_id = study_id

    @classmethod
    def open(cls, url: str, name: str, directions: Sequence[StudyDirection], search_id: str) -> Ledger:
        """Open the study of a search, or make it; raise SpecError if the storage cannot be reached, or has another."""
        with _refused(url):
            storage = _storage(url)
            names = {study.study_name: study._study_id for study in storage.get_all_studies()}
            study_id = names.get(name)
            if study_id is None:
                study_id = storage.create_new_study(directions, name)
            owner = storage.get_study_user_attrs(study_id).get(_OWNER)
            if owner is None and not storage.get_all_trials(study_id):
                storage.set_study_user_attr(study_id, _OWNER, search_id)
                owner = search_id
        if owner != search_id:
            raise SpecError(
                f"storage={url} already has a study {name}, which is not of this folder. Give another name with "
                "--study, or the --run-dir of that search."
            )
        return cls(storage, study_id)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return sorted(self.storage.get_all_trials(self._study_id), key=lambda trial: trial.number)

    def begin(self, trial: FrozenTrial) -> None:
        """Record a trial that is about to run, with its parameters, in one transaction: whole, or not at all."""
        trial_id = self.storage.create_new_trial(self._study_id, template_trial=trial)
        assert self.storage.get_trial(trial_id).number == trial.number, "another search writes to this study"

    def report(self, number: int, evaluation: int, value: float) -> None:
        """Record the value of an evaluation; a second time it changes nothing."""
        self.storage.set_trial_intermediate_value(self._id(number), evaluation, value)

    def end(self, trial: FrozenTrial) -> None:
        """Record how a trial ended: its state last, so that a kill before that leaves it running."""
        trial_id = self._id(trial.number)
        for evaluation, value in trial.intermediate_values.items():
            self.storage.set_trial_intermediate_value(trial_id, evaluation, value)
        for key, value in trial.system_attrs.items():
            self.storage.set_trial_system_attr(trial_id, key, value)
        for key, value in trial.user_attrs.items():
            self.storage.set_trial_user_attr(trial_id, key, value)
        self.storage.set_trial_state_values(trial_id, trial.state, trial.values)

    def close(self) -> None:
        """Close the connections to the storage."""
        if isinstance(self.storage, RDBStorage):
            self.storage.engine.dispose()

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


def storage_url(folder: Path, storage: str | None) -> str:
    """Return where a study is stored: in the search's folder, or at a URL; `journal`: a file for many writers."""
    if storage is None:
        return f"sqlite:///{(folder / 'study.db').absolute()}"
    return f"{JOURNAL}:{(folder / 'study.journal').absolute()}" if storage == JOURNAL else storage


def _storage(url: str) -> BaseStorage:
    if url.startswith(f"{JOURNAL}:"):
        return JournalStorage(JournalFileBackend(url.removeprefix(f"{JOURNAL}:")))
    return RDBStorage(url)


@contextlib.contextmanager
def _refused(url: str) -> Iterator[None]:
    """Turn what goes wrong when a storage is opened into one sentence."""
    logging.getLogger("optuna").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except Exception as error:  # each database's driver has errors of its own
        line = next((line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()), "")
        raise SpecError(
            f"storage={url} cannot be opened: {type(error).__name__}: {line[:200]} Give the URL of a database that is "
            "reached from here (sqlite:///FILE, mysql://…, postgresql://…), or leave --storage out."
        ) from error
