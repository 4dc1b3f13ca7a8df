"""Gradients that are not cleared between steps, or cleared before they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import BackwardRan, GradientsCleared, StepTaken
from instep.check.records.timeline import TrainingStep, steps_of
from instep.check.rule import Rule
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import loops_around

_CLEARS = ("zero_grad", "zero_")


class ZeroGrad(Rule):
    """Finds steps on gradients of earlier steps, steps without gradients, and micro-batches that are thrown away."""

    id = "zero-grad"
    severity = Severity.ERROR
    effect = "The optimizer steps on other gradients than those of its batch: old ones added, or some lost."
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield what each optimizer's steps show."""
        for steps in steps_of(observed, 0).values() if observed.world_size else ():
            yield from self._carried(steps)
            yield from self._cleared_early(steps)
            yield from self._thrown_away(steps)

    def _carried(self, steps: Sequence[TrainingStep]) -> Iterable[Finding]:
        carried = [step for step in steps[1:] if _carries(step)]
        if len(carried) > 1 and 2 * len(carried) > len(steps) - 1:
            backward = carried[0].of(BackwardRan)[0]
            yield self.finding(
                (backward.file, backward.line),
                "The backward pass adds to the gradients of earlier steps: nothing clears them.",
                f"in {len(carried)} of {len(steps)} steps no gradient was cleared since the step before",
                "+ optimizer.zero_grad()  # before loss.backward()",
            )

    def _cleared_early(self, steps: Sequence[TrainingStep]) -> Iterable[Finding]:
        empty = [clear for step in steps if step.taken.all_zero and (clear := _clear_after_backward(step)) is not None]
        if len(empty) > 1 and 2 * len(empty) > len(steps):
            yield self.finding(
                (empty[0].file, empty[0].line),
                "Gradients are cleared between the backward pass and optimizer.step, which then does nothing.",
                f"in {len(empty)} of {len(steps)} steps every gradient was zero or None",
                "Move zero_grad() before loss.backward(), or after optimizer.step().",
            )

    def _thrown_away(self, steps: Sequence[TrainingStep]) -> Iterable[Finding]:
        lost = [clear for step in steps if (clear := _clear_between(step)) is not None]
        if len(lost) > 1 and 2 * len(lost) > len(steps):
            yield self.finding(
                (lost[0].file, lost[0].line),
                "Gradients are cleared in every micro-step, but used only in the last one: the others are lost.",
                f"in {len(lost)} of {len(steps)} steps gradients of the same line were cleared before the step",
                "Call zero_grad() only after optimizer.step().",
                Severity.WARNING,  # a script may have collected them by hand before
            )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield loops that call backward and step, in a file that clears nothing."""
        if any(call.last in _CLEARS for call in module.calls) or _sets_grad_to_none(module):
            return
        for call in module.calls_of("backward"):
            if call.name.startswith("torch.distributed.autograd."):
                continue  # each of its contexts has gradients of its own
            loop = next(iter(loops_around(module, call.node)), None)
            if loop is not None and any(loop in module.around(step.node) for step in _optimizer_steps(module)):
                yield self.finding(
                    module.place(call.node),
                    "This loop calls backward and step, and nothing in the file clears gradients.",
                    module.line(call.node.lineno),
                    "+ optimizer.zero_grad()  # before loss.backward()",
                    Severity.WARNING,
                )
                return

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse what ran: `judge` has seen whether gradients were cleared."""
        return observed.has(StepTaken)


def _carries(step: TrainingStep) -> bool:
    """Return whether a step's gradients contain those of the step before."""
    passes = step.of(BackwardRan)
    clears = any(clear.optimizer == step.taken.optimizer for clear in step.of(GradientsCleared))
    return bool(passes) and not clears and not any(step.taken.optimizer in event.cleared for event in passes)


def _clear_after_backward(step: TrainingStep) -> GradientsCleared | None:
    """Return what cleared the gradients after the last backward pass before a step."""
    for event in reversed(step.events):
        if isinstance(event, GradientsCleared) and event.optimizer == step.taken.optimizer and event.lost:
            return event
        if isinstance(event, BackwardRan):
            return None
    return None


def _clear_between(step: TrainingStep) -> GradientsCleared | None:
    """Return what threw away a gradient of the line that also made the step's own.

    Other lines do not count: the generator's loss leaves gradients in a discriminator. Nor does a closure, which an
    optimizer may call many times.
    """
    passes = step.of(BackwardRan)
    if not passes or any(clear.in_step for clear in step.of(GradientsCleared)):
        return None
    thrown: GradientsCleared | None = None
    made_by_same_line = False
    for event in step.events[: step.events.index(passes[-1])]:
        if isinstance(event, BackwardRan):
            made_by_same_line = (event.file, event.line) == (passes[-1].file, passes[-1].line)
        elif isinstance(event, GradientsCleared) and event.optimizer == step.taken.optimizer:
            thrown = event if event.lost and made_by_same_line else thrown
    return thrown


def _sets_grad_to_none(module: SourceModule) -> bool:
    targets = (target for node in ast.walk(module.tree) if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)


def _optimizer_steps(module: SourceModule) -> Iterable[Call]:
    return (call for call in module.calls_of("step") if "opt" in call.name.lower())
