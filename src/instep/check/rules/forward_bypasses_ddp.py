"""The forward pass goes around DistributedDataParallel, so that its gradients are not reduced."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import Cause, describe, differences_by_cause
from instep.check.records.gradients import StepTaken, WrapperBypassed
from instep.check.rule import Rule
from instep.check.source.collective_calls import agrees
from instep.check.source.functions import assignments, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import DDP, assigned_from, is_without_gradients, scope_of


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
                if _trains(module, call, variable):
                    yield self.finding(
                        module.place(call.node),
                        f"`{variable}.module` is called directly: DistributedDataParallel does not see this pass.",
                        module.line(call.node.lineno),
                        f"Call `{variable}(…)`, or use torch.no_grad() if no gradients are meant to come from here.",
                        Severity.WARNING,
                    )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines that ran, and whose gradients came out equal on all ranks."""
        return observed.has_at(WrapperBypassed, finding.place)


def _trains(module: SourceModule, call: Call, variable: str) -> bool:
    """Return whether a loss is computed from a call, and nothing else reduces the gradients that come from it."""
    if is_without_gradients(module, call.node) or _is_detached(module, call) or _is_frozen(module, variable):
        return False
    if _reduces_by_hand(module):
        return False
    sources = _sources_of_losses(module, scope_of(module, call.node), call.node.lineno)
    nodes = {node for source in sources for node in ast.walk(source)}
    through_wrapper = any(other.name == variable and other.node in nodes for other in module.calls)
    return call.node in nodes and not through_wrapper  # one pass through the wrapper, and it reduces all


def _sources_of_losses(module: SourceModule, scope: ast.AST, line: int) -> list[ast.expr]:
    """Return the expressions that the next backward pass in a scope goes back through."""
    inside = set(ast.walk(scope))
    later = [call for call in module.calls_of("backward") if call.node in inside and call.node.lineno >= line]
    sources: list[ast.expr] = [call.node for call in later[:1]]
    wanted = {name for source in sources for name in names_in(source)}
    for _ in range(6):
        for set_names, value in assignments(scope):
            if set_names & wanted and value not in sources and not _is_detach(value):
                sources.append(value)
                wanted |= names_in(value)
    return sources


def _is_detached(module: SourceModule, call: Call) -> bool:
    """Return whether what a call returns is detached at once, or only its number is taken."""
    parents = (outer for outer in module.around(call.node) if isinstance(outer, ast.Call))
    return any(_is_detach(outer) for outer in parents)


def _is_detach(value: ast.expr) -> bool:
    name = value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""
    return name in ("detach", "item", "argmax", "tolist")


def _is_frozen(module: SourceModule, variable: str) -> bool:
    frozen = [call for call in module.calls_of("requires_grad_") if "False" in ast.unparse(call.node)]
    return any(call.name.startswith((f"{variable}.requires", f"{variable}.module.requires")) for call in frozen)


def _reduces_by_hand(module: SourceModule) -> bool:
    """Return whether a file reduces gradients itself."""
    by_name = any("grad" in call.last and ("sync" in call.last or "reduce" in call.last) for call in module.calls)
    return by_name or any(agrees(call) and "grad" in ast.unparse(call.node) for call in module.calls)
