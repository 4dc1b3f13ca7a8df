"""`--pruner pbt`: population-based training ([Note: Population-based training], [Note: Forked runs])."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from instep.checkpoint.fork import fork_checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.durations import Cadence
from instep.core.errors import CheckpointError, SpecError
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.train.directory import prepare_directory
from instep.train.task import field_names
from instep.tune.folder import SearchFolder
from instep.tune.objective import OUT_OF_MEMORY
from instep.tune.population import (
    Copy,
    Member,
    PopulationPlan,
    PopulationSpec,
    explore,
    mutations_of,
    plan_population,
)
from instep.tune.result import COPIED
from instep.tune.scheduler import Ending, TrialScheduler, Verdict
from instep.tune.space import Range
from instep.tune.study import SearchStudy
from instep.tune.trial_run import TrialPlan

if TYPE_CHECKING:
    from instep.tune.plan import SearchPlan


class PopulationScheduler(TrialScheduler):
    """Trains a population; the worst of it copy the best."""

    waits_for_all = True
    paused_are_known = False  # the population is drawn before anything is known of it, however many run at once

    def __init__(self, plan: SearchPlan, study: SearchStudy, folder: SearchFolder) -> None:
        super().__init__(plan, study, folder)
        self._spec = PopulationSpec.parse(plan.tune.pruner)
        self._reached: dict[int, tuple[int, float]] = {}
        """By trial: the evaluation at which it is to pause, and its value. It counts once the trial has paused."""

    @classmethod
    def check_name(cls, pruner: str) -> None:
        """Raise SpecError for options that cannot be."""
        PopulationSpec.parse(pruner)

    @classmethod
    def check(cls, plan: SearchPlan) -> None:
        """Raise SpecError for a population of one, for trials without evaluations, and for what cannot be changed."""
        spec = PopulationSpec.parse(plan.tune.pruner)
        if plan.num_trials < 2:
            raise SpecError(
                f"trials={plan.num_trials} with --pruner pbt is a population of one, which has nobody to copy. "
                "Use --trials 4 or more."
            )
        if Cadence.parse("eval_every", plan.spec.eval_every) == Cadence():
            raise SpecError("eval_every=never with --pruner pbt: it compares trials by evaluations. Use 1epoch or 100.")
        for name in spec.hyperparam_mutations:
            if why := _why_fixed(plan, name):
                raise SpecError(f"pruner={plan.tune.pruner}: {name} cannot be changed in a training: {why}")
        if not plan.suggests and not spec.hyperparam_mutations:
            ranges = [d for d in plan.space.values() if isinstance(d, Range) and not d.is_int]
            if not ranges:
                raise SpecError(
                    "pruner=pbt changes fractional numbers in the course of a training, and none is searched. Give a "
                    "range, such as lr=1e-4..1e-1:log, or name what to change: pbt:hyperparam_mutations=NAME."
                )

    @classmethod
    def describe(cls, plan: SearchPlan) -> dict[str, Any]:
        """Return the size of the population, which more trials would change."""
        return {"population": plan.num_trials}

    def begin(self, trial: FrozenTrial) -> bool:  # noqa: ARG002 - `resume` finds out
        """Return True: whatever nobody trains waits for `resume`."""
        return True

    def take(self, number: int, evaluation: int, value: float) -> Verdict:
        """Report an evaluation; that of a pause counts when the trial has paused there."""
        if evaluation in self.study.trials[number].intermediate_values:
            return Verdict.IGNORED
        if evaluation >= self._plan().until:
            self._reached[number] = (evaluation, value)
            return Verdict.IGNORED
        self.study.evaluate(number, evaluation, value)
        return Verdict.CONTINUES

    def end(self, number: int, ending: Ending) -> bool:
        """Report the evaluation of the pause; return whether the trial is paused there."""
        reached = self._reached.pop(number, None)
        if reached is None or ending == "failed":
            return False
        self.study.evaluate(number, *reached)
        return ending == "preempted"

    def adapt(self, plan: TrialPlan) -> TrialPlan:
        """Return a trial that pauses at the end of its generation, counted on from the trial that it copies."""
        every, until = Cadence.parse("eval_every", plan.spec.eval_every), self._plan().until
        pause_at = f"{every.epochs * until}epochs" if every.epochs is not None else str((every.steps or 0) * until)
        copy = copy_of(self.study.trials[plan.number])
        return dataclasses.replace(
            plan,
            spec=dataclasses.replace(plan.spec, pause_at=pause_at),
            first_evaluation=copy.evaluation if copy is not None else 0,
        )

    def resume(self, paused: set[int]) -> int | None:
        """Record the copies that are due, and return the first member that is not as far as it shall be."""
        if copies := self._plan().copies:
            for copy in copies:
                paused.add(self._record(copy))
        plan = self._plan()
        for number in (trial.number for trial in self.study.unfinished() if copy_of(trial) is not None):
            self._fork(number)  # also those that a killed process has only recorded; before anybody continues
        for number, successor in plan.replaced:
            self._end_replaced(number, successor)
            paused.discard(number)
        trials = self.study.trials
        paused -= {trial.number for trial in trials if trial.state.is_finished()}  # a copy that could not be made
        waiting = (n for n in plan.members if n in paused and plan.until not in trials[n].intermediate_values)
        return next(waiting, None)

    def _plan(self) -> PopulationPlan:
        size, goal = self.plan.num_trials, self.plan.tune.goals[0]
        members = [_member(trial) for trial in self.study.trials]
        return plan_population(self._spec, size, members, self.plan.seed, goal.is_lowest_best)

    def _record(self, copy: Copy) -> int:
        """Record a copy as a trial, with its parameters; return its number."""
        source = self.study.trials[copy.trial]
        params = explore(self._spec, copy, source.params, source.distributions, self.plan.seed)
        return self.study.next(self.plan.suggest, params, attributes={COPIED: copy._asdict()}).number

    def _fork(self, number: int) -> None:
        """Make the run directory of a copy, unless it is there."""
        trial, run_dir = self.study.trials[number], self.folder.trial(number)
        copy = copy_of(trial)
        if copy is None or RunDirectory(run_dir).is_fork:
            return
        source = RunDirectory(self.folder.trial(copy.trial))
        plan = self.plan.trial(number, trial.params, run_dir).as_begun(source.path)
        directory = prepare_directory(plan.task, plan.spec)
        try:
            checkpoint, complaints = source.newest()
            if checkpoint is None:
                raise CheckpointError(f"{source.path} has no checkpoint to copy. {' '.join(complaints)}".strip())
            donor = self.study.trials[copy.trial]
            changed = mutations_of(self._spec, donor.distributions)
            origin = {name: donor.params[name] for name in changed if name in field_names(type(plan.task))}
            fork_checkpoint(checkpoint, directory.checkpoints, origin)
            directory.mark_fork({"run": str(source.path), "step": checkpoint.step, "fields": origin})
        except CheckpointError as error:
            self.study.end(number, TrialState.FAIL, None, {"sentence": str(error)})
        finally:
            directory.unlock()

    def _end_replaced(self, number: int, successor: int) -> None:
        trial = self.study.trials[number]
        if not trial.state.is_finished():
            at = max(trial.intermediate_values)
            sentence = f"replaced after evaluation {at} by trial {successor}"
            self.study.end(number, TrialState.PRUNED, None, {"sentence": sentence}, {OUT_OF_MEMORY: 0.0})


def copy_of(trial: FrozenTrial) -> Copy | None:
    """Return which trial a trial continues; None: it began by itself."""
    copied = trial.user_attrs.get(COPIED)
    return None if copied is None else Copy(**copied)


def _member(trial: FrozenTrial) -> Member:
    is_complete = trial.state == TrialState.COMPLETE
    return Member(trial.intermediate_values, trial.state.is_finished(), is_complete, copy_of(trial))


def _why_fixed(plan: SearchPlan, name: str) -> str:
    """Return why a parameter cannot change in the course of a training; empty: it can."""
    options = {option.name: option for option in options_of(TrainSpec)}
    if name not in plan.space and not plan.suggests:
        return f"it is not searched. Searched are {', '.join(plan.space)}."
    if name in plan.space and not isinstance(plan.space[name], Range):
        return f"{name}={plan.space[name]} are choices. Give a range of numbers."
    is_field = name in field_names(type(plan.task))
    if not is_field and isinstance(plan.space.get(name), Range) and options[name].type in (int, int | None):
        return "which samples a step has depends on it. Only fields of the Task and fractional options can."
    return ""
