"""The study of a search: which parameters come next, when a trial is pruned, how it ended.

[Note: A study that can be continued]
A search may be killed at any instant, and the same command continues it. So nothing that a decision depends on lives in
this process alone. All decisions are made on a copy of the study in memory; the storage (`Ledger`) gets the outcome.

- The parameters of trial n come from a sampler with a seed made of the search's seed and n, over the trials before it.
  The trial is recorded with all its parameters in one transaction. A kill leaves either no trial, and the next process
  draws the same parameters, or a whole one, and the next process continues its run directory.
- The evaluations of a trial are read from the events of its run, in order, each once. A trial that is continued is
  judged again from its first evaluation on, by a pruner that is new as well. What a pruner notes while a trial runs is
  stored only when the trial ends.
- A pruned trial is pruned at an evaluation, whatever the training did until it stopped. Even one that had reached its
  end by then is pruned, so that the study does not depend on how fast anything was.
- What a sampler keeps for the whole study (the position in a sequence) is stored with the trial that it was used for.

One trial after the other, a search is a function of its seed and of what the trials measured; in exact mode those are
the same bits again. With several trials at once, the order in which they end decides as well.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from instep.tune.ledger import Ledger, write_end

_STUDY_STATE, _LAST = "instep:study", "instep:last"


class SearchStudy:
    """A study in memory, whose outcome goes to a ledger. See [Note: A study that can be continued]."""

    def __init__(
        self,
        name: str,
        directions: Sequence[StudyDirection],
        ledger: Ledger,
        make_sampler: Callable[[int], BaseSampler],
        make_pruner: Callable[[], BasePruner],
        judges_again: bool = True,
    ) -> None:
        """`make_sampler` returns the sampler of the trial of a number.

        `judges_again`: evaluations of trials that were running are forgotten, and will be reported again.
        """
        self._ledger = ledger
        self._make_sampler, self._make_pruner = make_sampler, make_pruner
        self._storage = InMemoryStorage()
        self._study = optuna.create_study(storage=self._storage, study_name=name, directions=directions)
        self._study_id = self._storage.get_study_id_from_name(name)
        self._judges_again = judges_again
        self._pruners: dict[int, BasePruner] = {}
        self.is_exhausted = False
        """Whether the sampler has tried everything that there is."""
        for trial in ledger.trials():
            self._take(trial)

    def _take(self, stored: FrozenTrial) -> None:
        """Copy a trial from the ledger; one that was running is judged again from the beginning."""
        trial = copy.deepcopy(stored)
        if not trial.state.is_finished() and self._judges_again:
            trial.intermediate_values = {}
        self._storage.create_new_trial(self._study_id, template_trial=trial)
        for key, value in trial.system_attrs.get(_STUDY_STATE, {}).items():
            self._storage.set_study_system_attr(self._study_id, key, value)
        self.is_exhausted |= _LAST in trial.user_attrs

    def sync(self) -> None:
        """Take in what other processes have recorded meanwhile: trials that they began, and how theirs ended."""
        known = self.trials
        for stored in self._ledger.trials():
            if stored.number >= len(known):
                self._take(stored)
            elif not known[stored.number].state.is_finished():
                self._follow(known[stored.number], stored)

    def _follow(self, trial: FrozenTrial, stored: FrozenTrial) -> None:
        """Take in what the ledger knows of a trial that has not ended here."""
        if stored.state.is_finished():
            write_end(self._storage, trial._trial_id, stored)
            self.is_exhausted |= _LAST in stored.user_attrs
        elif not self._judges_again:
            for evaluation in stored.intermediate_values.keys() - trial.intermediate_values.keys():
                value = stored.intermediate_values[evaluation]
                self._storage.set_trial_intermediate_value(trial._trial_id, evaluation, value)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self._study.get_trials(deepcopy=False)

    @property
    def study(self) -> optuna.Study:
        """The study in memory, to be read."""
        return self._study

    def unfinished(self) -> list[FrozenTrial]:
        """Return the trials that have not ended, by number."""
        return [trial for trial in self.trials if not trial.state.is_finished()]

    def next(
        self,
        suggest: Callable[[Trial], None],
        point: Mapping[str, Any] | None = None,
        paused: Collection[int] = (),
        attributes: Mapping[str, Any] | None = None,
    ) -> FrozenTrial:
        """Draw the parameters of the next trial, and record it as running.

        `point`: values that are given. `paused`: trials whose values the sampler may learn from as from pruned ones.
        `attributes`: what is recorded of the trial together with them; only with a point, and without paused trials.
        """
        if paused:
            return self._next_beside(suggest, point, paused)
        number = len(self.trials)
        if point is not None:
            self._study.enqueue_trial(dict(point), user_attrs=dict(attributes or {}))
        self._equip(number)
        trial = self._study.ask()
        with _quiet():
            suggest(trial)
        state = self._storage.get_study_system_attrs(self._study_id)
        trial.storage.set_trial_system_attr(trial._trial_id, _STUDY_STATE, state)
        begun = self.trials[number]
        self._ledger.begin(begun)
        return begun

    def _next_beside(
        self, suggest: Callable[[Trial], None], point: Mapping[str, Any] | None, paused: Collection[int]
    ) -> FrozenTrial:
        """Draw as `next` does, in a study in which trials that are paused have ended: samplers ignore running ones."""
        storage, name, number = InMemoryStorage(), self._study.study_name, len(self.trials)
        study = optuna.create_study(storage=storage, study_name=name, directions=self._study.directions)
        study_id = storage.get_study_id_from_name(name)
        for key, value in self._storage.get_study_system_attrs(self._study_id).items():
            storage.set_study_system_attr(study_id, key, value)
        for trial in self.trials:
            shown = copy.deepcopy(trial)
            if trial.number in paused:
                shown.state, shown.datetime_complete = TrialState.PRUNED, shown.datetime_start
            storage.create_new_trial(study_id, template_trial=shown)
        if point is not None:
            study.enqueue_trial(dict(point))
        with _quiet():
            study.sampler = self._make_sampler(number)
            suggest(study.ask())
        begun = copy.deepcopy(study.get_trials(deepcopy=False)[number])
        begun.system_attrs[_STUDY_STATE] = storage.get_study_system_attrs(study_id)
        for key, value in begun.system_attrs[_STUDY_STATE].items():
            self._storage.set_study_system_attr(self._study_id, key, value)
        self._storage.create_new_trial(self._study_id, template_trial=begun)
        self._ledger.begin(self.trials[number])
        return self.trials[number]

    def evaluate(self, number: int, evaluation: int, value: float) -> bool:
        """Record the value of an evaluation, counted from 1; return whether to prune the trial now."""
        self._equip(number)
        trial = self._trial(number)
        trial.report(value, evaluation)
        self._ledger.report(number, evaluation, value)
        return bool(trial.should_prune())

    def end(
        self,
        number: int,
        state: TrialState,
        values: Sequence[float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        constraints: Mapping[str, float] | None = None,
    ) -> FrozenTrial:
        """Record how a trial ended."""
        self._equip(number)
        trial = self._trial(number)
        for key, attribute in (attributes or {}).items():
            trial.set_user_attr(key, attribute)
        for key, violation in (constraints or {}).items():
            trial.set_constraint(key, violation)
        try:
            self._study.tell(number, values, state)
        except RuntimeError:  # of `Study.stop`, outside of Optuna's own loop: grid and brute force have tried all
            if not self.trials[number].state.is_finished():
                raise
            self.is_exhausted = True
        ended = copy.deepcopy(self.trials[number])
        if self.is_exhausted:
            ended.user_attrs[_LAST] = True
        self._ledger.end(ended)
        self._pruners.pop(number, None)
        return ended

    def _equip(self, number: int) -> None:
        """Set the sampler and the pruner of a trial in the study."""
        with _quiet():
            self._study.sampler = self._make_sampler(number)
            self._study.pruner = self._pruners.setdefault(number, self._make_pruner())

    def _trial(self, number: int) -> Trial:
        return Trial(self._study, self.trials[number]._trial_id)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore Optuna's warnings about features that it calls experimental: the user chose them by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
