"""`no_sync` around the wrong pass: gradients that are not reduced before a step, or reduced for nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import Cause, describe, differences_by_cause
from instep.check.records.gradients import BackwardRan, ForwardRan, StepTaken
from instep.check.records.timeline import TrainingStep, steps_of
from instep.check.rule import Rule
from instep.check.source.module import SourceModule
from instep.check.source.wrapped_models import is_inside

_NO_EFFECT = "no_sync surrounds the backward pass only: the forward pass decides, and gradients are reduced anyway."


class NoSyncMisplaced(Rule):
    """Finds steps on gradients that `no_sync` kept local, and `no_sync` that has no effect."""

    id = "no-sync-misplaced"
    severity = Severity.ERROR
    effect = "The optimizer steps on gradients of one rank: the replicas drift apart."
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield steps on local gradients, then backward passes that reduce inside `no_sync`."""
        num_steps = len(observed.by_rank(StepTaken)[0]) if observed.world_size else 0
        for (wrapper, cause), differing in differences_by_cause(observed).items():
            if cause is Cause.NO_SYNC:
                step = differing[0].steps[0]
                last = [forward for forward in step.of(ForwardRan) if forward.wrapper == wrapper][-1]
                yield self.finding(
                    _decision(modules, last.file, last.line),
                    "The last forward pass before optimizer.step ran inside no_sync, so gradients were never reduced.",
                    describe(differing, num_steps),
                    "Leave no_sync for the last micro-step: `sync = (i + 1) % accumulate == 0`.",
                )
        yield from self._sharded(observed)
        yield from self._without_effect(observed, modules)

    def _sharded(self, observed: Observed) -> Iterable[Finding]:
        for steps in _steps(observed):
            local = [step for step in steps if (passes := step.of(BackwardRan)) and passes[-1].unreduced]
            if local:
                last = local[0].of(BackwardRan)[-1]
                yield self.finding(
                    (last.file, last.line),
                    "The last backward pass before optimizer.step ran with gradient sync switched off for FSDP.",
                    f"in {len(local)} of {len(steps)} steps; {local[0].taken.num_without_gradient} of "
                    f"{local[0].taken.num_parameters} parameters of the optimizer had no gradient",
                    "Call model.set_requires_gradient_sync(True) before the last micro-step's backward pass.",
                )
                return

    def _without_effect(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        wasted = [backward for steps in _steps(observed) for step in steps for backward in _reduced_anyway(step)]
        if wasted:
            yield self.finding(
                _enclosing_no_sync(modules, wasted[0]),
                _NO_EFFECT,
                f"{len(wasted)} backward passes inside no_sync followed forward passes outside of it",
                "Move the forward pass into the `with model.no_sync():` block.",
                Severity.WARNING,
            )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield backward passes inside a `with …no_sync():` that holds nothing else."""
        for call in module.calls_of("backward"):
            outer = next((node for node in module.around(call.node) if isinstance(node, ast.With)), None)
            if outer is not None and is_inside(module, outer.body[0], ("no_sync",)) and len(outer.body) == 1:
                yield self.finding(
                    module.place(call.node),
                    _NO_EFFECT,
                    module.line(call.node.lineno),
                    "Move the forward pass into the `with model.no_sync():` block.",
                    Severity.WARNING,
                )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse what ran: `judge` has seen every backward pass."""
        return observed.has(BackwardRan)


def _steps(observed: Observed) -> Iterable[list[TrainingStep]]:
    return steps_of(observed, 0).values() if observed.world_size else ()


def _reduced_anyway(step: TrainingStep) -> list[BackwardRan]:
    """Return the backward passes inside `no_sync` whose forward pass had been outside of it."""
    wasted: list[BackwardRan] = []
    reduces = False
    for event in step.events:
        if isinstance(event, ForwardRan) and event.enabled:
            reduces = event.reduces
        elif isinstance(event, BackwardRan):
            wasted += [event] if event.in_no_sync and reduces else []
            reduces = False
    return wasted


def _decision(modules: Sequence[SourceModule], file: str, line: int) -> tuple[str, int]:
    """Return the line before a forward pass that decides on `no_sync`, if it is near; else the forward pass."""
    for module in modules:
        if module.path == file:
            for before in range(line - 1, max(0, line - 6), -1):
                if "%" in module.line(before):
                    return file, before
    return file, line


def _enclosing_no_sync(modules: Sequence[SourceModule], backward: BackwardRan) -> tuple[str, int]:
    """Return the `with` line around a backward pass."""
    for module in modules:
        if module.path == backward.file:
            for call in module.calls_of("no_sync"):
                if call.node.lineno <= backward.line and backward.line - call.node.lineno <= 3:
                    return backward.file, call.node.lineno
    return backward.file, backward.line
