"""The forward pass goes around DistributedDataParallel, so that its gradients are not reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import Cause, describe, differences_by_cause
from instep.check.records.gradients import StepTaken, WrapperBypassed
from instep.check.rule import Rule
from instep.check.source.module import SourceModule
from instep.check.source.wrapped_models import DDP, assigned_from, is_without_gradients


class ForwardBypassesDdp(Rule):
    """Finds calls of `model.module` that a loss depends on."""

    id = "forward-bypasses-ddp"
    severity = Severity.ERROR
    effect = (
        "Every rank trains on its own gradients: replicas drift apart, and the saved one has seen a part of the data."
    )
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:  # noqa: ARG002
        """Yield one finding for each wrapper whose gradients differ after calls that went around it."""
        num_steps = len(observed.by_rank(StepTaken)[0]) if observed.world_size else 0
        for (wrapper, cause), differing in differences_by_cause(observed).items():
            if cause is not Cause.BYPASSED:
                continue
            calls = [
                call for step in differing for call in step.steps[0].of(WrapperBypassed) if call.wrapper == wrapper
            ]
            part = f"the model's part {calls[0].module}" if calls[0].module else "the wrapped model"
            yield self.finding(
                (calls[0].file, calls[0].line),
                f"{part[0].upper()}{part[1:]} is called directly, not through DistributedDataParallel, which then "
                "reduces nothing.",
                describe(differing, num_steps),
                "Call the wrapper, `model(…)`; give the model a forward() that returns all that the loss needs.",
            )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield calls of `model.module` with gradients enabled."""
        for variable in assigned_from(module, DDP):
            for call in module.calls_of(f"{variable}.module", f"{variable}.module.forward"):
                if not is_without_gradients(module, call.node) and _trains(module, call.node.lineno):
                    yield self.finding(
                        module.place(call.node),
                        f"`{variable}.module` is called directly: DistributedDataParallel does not see this pass.",
                        module.line(call.node.lineno),
                        f"Call `{variable}(…)`, or use torch.no_grad() if no gradients are meant to come from here.",
                        Severity.WARNING,
                    )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines that ran, and whose gradients came out equal on all ranks."""
        ran = (call for calls in observed.by_rank(WrapperBypassed) for call in calls)
        return any((call.file, call.line) == (finding.file, finding.line) for call in ran)


def _trains(module: SourceModule, line: int) -> bool:
    """Return whether a backward pass follows a line closely: otherwise the call may be an evaluation."""
    return any(0 <= call.node.lineno - line <= 10 for call in module.calls_of("backward"))
