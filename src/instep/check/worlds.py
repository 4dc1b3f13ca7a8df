"""The same script at several world sizes: what changes besides the speed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from instep.check.finding import Severity
from instep.check.observations import Observed
from instep.check.records.run import OptimizerStepped, TrainingEpochBegan
from instep.check.result import CheckResult
from instep.check.world_training import compare_losses, compare_samples
from instep.core.plural import plural

_NEAR = 1e-6


def merge_results(results: Sequence[CheckResult]) -> CheckResult:
    """Return the findings at all world sizes, each once, and what was seen at the last, which has the most ranks."""
    last = results[-1]
    findings = {(f.rule, f.file, f.line): f for result in results for f in result.findings}
    suppressed = {(s.finding.rule, s.finding.file, s.finding.line): s for result in results for s in result.suppressed}
    watched = [f"{result.watched[0]} ({', '.join(result.watched[1:])})" for result in results[:-1] if result.watched]
    order = list(Severity)
    return replace(
        last,
        findings=sorted(findings.values(), key=lambda f: (order.index(f.severity), f.file, f.line)),
        suppressed=list(suppressed.values()),
        notices=list(dict.fromkeys(notice for result in results for notice in result.notices)),
        watched=[*watched, *last.watched],
    )


def compare_worlds(runs: Sequence[Observed]) -> list[str]:
    """Return one sentence for each part of the recipe that differs between world sizes, or that they have in common."""
    if len(runs) < 2:
        return []
    return [*_compare_epochs(runs), *compare_samples(runs), *_compare_rates(runs), *compare_losses(runs)]


def _compare_epochs(runs: Sequence[Observed]) -> list[str]:
    lengths = [epoch_steps(run) for run in runs]
    if None in lengths:
        return ["no whole epoch was seen at every number of processes"]
    text = _each(runs, [plural(length or 0, "step") for length in lengths])
    if len(set(lengths)) == 1:
        return [f"an epoch has {plural(lengths[0] or 0, 'step')} at any number of processes"]
    return [f"an epoch has {text}: the global batch grows with the number of processes"]


def _compare_rates(runs: Sequence[Observed]) -> list[str]:
    rates = [learning_rates(run) for run in runs]
    for step, at_step in enumerate(zip(*rates, strict=False)):
        if not all(math.isclose(rate, at_step[0], rel_tol=_NEAR) for rate in at_step):
            text = _each(runs, [f"{rate:.4g}" for rate in at_step])
            return [f"the learning rate differs from step {step + 1} on: {text}"]
    num_steps = min(map(len, rates))
    return [f"the learning rate of the first {plural(num_steps, 'step')} is the same"] if num_steps else []


def _each(runs: Sequence[Observed], values: Sequence[str]) -> str:
    parts = [f"{value} with {plural(run.world_size, 'rank')}" for run, value in zip(runs, values, strict=True)]
    return ", ".join(parts)


def epoch_steps(run: Observed) -> int | None:
    """Return how many steps rank 0 makes in an epoch; None: the second one was not seen."""
    begun = [epoch.step for epoch in run.by_rank(TrainingEpochBegan)[0]]
    return begun[1] - begun[0] if len(begun) > 1 else None


def learning_rates(run: Observed) -> list[float]:
    """Return the learning rate of each step of rank 0's first optimizer."""
    return [step.lr for step in run.by_rank(OptimizerStepped)[0] if step.optimizer == 0 and step.lr is not None]
