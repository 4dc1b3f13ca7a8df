"""How a trial ended, as the study records it."""

from __future__ import annotations

import math
from typing import Any

from optuna.trial import TrialState

from instep.core.errors import EXIT_SPEC, FailureRecord
from instep.tune.objective import OUT_OF_MEMORY, check_names
from instep.tune.plan import SearchPlan
from instep.tune.study import SearchStudy
from instep.tune.trial_run import Evaluation, TrialPlan, measures

Facts = dict[str, Any]
"""What is recorded of a trial beside its values."""


class TrialRecorder:
    """Records ends of trials."""

    def __init__(self, plan: SearchPlan, study: SearchStudy) -> None:
        self._plan, self._study = plan, study

    def complete(self, plan: TrialPlan, result: dict[str, Any], facts: Facts) -> None:
        """Record a training that is complete: with its values, or as failed if they are not finite."""
        goals, limits = self._plan.tune.goals, self._plan.tune.limits
        check_names(goals, limits, result["metrics"])
        measured = measures(plan.run_dir, result)
        values = [measured[goal.name] for goal in goals]
        facts |= {"weights_sha256": result["weights_sha256"], "steps": result["steps"]}
        if bad := [goal.name for goal, value in zip(goals, values, strict=True) if not math.isfinite(value)]:
            self.fail(plan.number, f"{bad[0]} is {measured[bad[0]]} in the end: it diverged.", facts)
            return
        violations = {str(limit): limit.violation(measured) for limit in limits}
        if broken := [f"{limit}: it is {measured[limit.name]:g}" for limit in limits if violations[str(limit)] > 0]:
            facts["sentence"] = "; ".join(broken)
        self._study.end(plan.number, TrialState.COMPLETE, values, facts, {OUT_OF_MEMORY: 0.0, **violations})

    def prune(self, number: int, at: Evaluation, facts: Facts) -> None:
        """Record a trial that was pruned at an evaluation."""
        facts["sentence"] = f"pruned at evaluation {at.number}, after step {at.step}"
        self._study.end(number, TrialState.PRUNED, None, facts, {OUT_OF_MEMORY: 0.0})

    def leave(self, number: int, sentence: str) -> None:
        """Record a trial that was paused and is not continued."""
        self._study.end(number, TrialState.PRUNED, None, {"sentence": sentence}, {OUT_OF_MEMORY: 0.0})

    def out_of_memory(self, number: int, failure: FailureRecord, facts: Facts) -> None:
        """Record a trial for which memory did not suffice."""
        facts["sentence"] = f"out of memory: {sentence_of(failure)}"
        self._study.end(number, TrialState.PRUNED, None, facts, {OUT_OF_MEMORY: 1.0})

    def fail(self, number: int, sentence: str, facts: Facts | None = None) -> None:
        """Record a trial that failed."""
        self._study.end(number, TrialState.FAIL, None, {**(facts or {}), "sentence": sentence})


def sentence_of(failure: FailureRecord) -> str:
    """Return a failure in one sentence; one of the recipe is no rank's own."""
    return failure.summary if failure.exit_code == EXIT_SPEC and not failure.traceback else failure.line
