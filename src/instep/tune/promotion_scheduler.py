"""`--pruner asha`: trials are paused at rungs, and the best of a rung continue ([Note: Promotion])."""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial

from instep.tune.folder import SearchFolder
from instep.tune.promotion import Promotion, PromotionSpec
from instep.tune.scheduler import Ending, TrialScheduler, Verdict
from instep.tune.study import SearchStudy
from instep.tune.trial_run import TrialPlan

if TYPE_CHECKING:
    from instep.tune.plan import SearchPlan


class PromotionScheduler(TrialScheduler):
    """Pauses trials at rungs and continues the best."""

    has_rungs = True

    def __init__(self, plan: SearchPlan, study: SearchStudy, folder: SearchFolder) -> None:
        super().__init__(plan, study, folder)
        self._promotion = Promotion(PromotionSpec.parse(plan.tune.pruner), plan.tune.goals[0].is_lowest_best)
        self._at_rung: set[int] = set()
        """Trials that were asked to stop at their rung, and have not ended yet."""

    @classmethod
    def check_name(cls, pruner: str) -> None:
        """Raise SpecError for options that cannot be."""
        PromotionSpec.parse(pruner)

    def begin(self, trial: FrozenTrial) -> bool:
        """Take in a trial; return whether it waits at a rung."""
        return self._promotion.begin(trial.number, trial.intermediate_values)

    def take(self, number: int, evaluation: int, value: float) -> Verdict:
        """Count an evaluation up to the rung that the trial is trained to, and pause it there."""
        if evaluation > self._promotion.allowed(number) or evaluation in self.study.trials[number].intermediate_values:
            return Verdict.IGNORED
        self.study.evaluate(number, evaluation, value)
        if not self._promotion.reach(number, evaluation, value):
            return Verdict.CONTINUES
        self._at_rung.add(number)
        return Verdict.PAUSED

    def end(self, number: int, ending: Ending) -> bool:  # noqa: ARG002 - what came after the rung does not count
        """Return whether the trial had reached its rung, however it ended."""
        is_paused = number in self._at_rung
        self._at_rung.discard(number)
        return is_paused

    def adapt(self, plan: TrialPlan) -> TrialPlan:
        """Return a trial on as many processes as those of its rung have."""
        if not (numbers := self.plan.tune.by_rung):
            return plan
        processes = numbers[min(self._promotion.rung(plan.number), len(numbers) - 1)]
        return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, processes=processes))

    def resume(self, paused: set[int]) -> int | None:
        """Return the trial that is promoted next."""
        return self._promotion.promote(paused)

    def resume_last(self, paused: AbstractSet[int]) -> int | None:
        """Return the best of the highest rung: a search has to have a winner."""
        return self._promotion.promote_best(set(paused))

    def sentence(self, number: int) -> str:
        """Return why a trial is not promoted."""
        rung, allowed = self._promotion.rung(number), self._promotion.allowed(number)
        return f"not promoted from rung {rung}, after evaluation {allowed}"
