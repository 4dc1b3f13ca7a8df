"""Rules, observations and findings for tests of what is around the rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.records.run import EvaluationBegan, OptimizerStepped
from instep.check.rule import Rule
from instep.check.source.module import SourceModule


class PrintRule(Rule):
    """Finds every print, by reading."""

    id = "prints"
    severity = Severity.WARNING
    effect = "A rank prints what others print, too."

    def read(self, module: SourceModule) -> Iterable[Finding]:
        for call in module.calls_of("print"):
            yield self.finding(
                module.place(call.node), "It prints.", module.line(call.node.lineno), "-print(x)\n+log(x)"
            )


class StepRule(Rule):
    """Finds every line with optimizer steps, at run time."""

    id = "steps"
    severity = Severity.ERROR
    effect = "Steps are made."
    watches: ClassVar[dict[type[Observation], str]] = {EvaluationBegan: "an evaluation"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        for steps in observed.by_rank(OptimizerStepped)[:1]:
            for place in dict.fromkeys((step.file, step.line) for step in steps):
                yield self.finding(place, "A step.", f"{len(steps)} steps", "Leave it out.")


def finding(rule: str = "steps", line: int = 1, severity: Severity = Severity.ERROR, file: str = "train.py") -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        file=file,
        line=line,
        message="It is wrong.",
        evidence="7 of 9",
        effect="Bad.",
        fix="-a\n+b",
    )


def steps(num: int, optimizer: int = 0) -> list[Observation]:
    return [OptimizerStepped(step=step, optimizer=optimizer, file="train.py", line=3) for step in range(num)]
