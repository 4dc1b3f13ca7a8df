"""Parameters that DistributedDataParallel does not know: added or unfrozen after the model was wrapped."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import Cause, Difference, describe, differences_by_cause, named
from instep.check.records.gradients import ModelWrapped, StepTaken, WrapperChanged
from instep.check.records.timeline import wrappers_of
from instep.check.rule import Rule
from instep.check.source.functions import Function, call_sites, function_around
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import DDP, assigned_from, scope_of


class ParametersChangedAfterWrapping(Rule):
    """Finds parameters whose gradients nobody reduces because they came after the wrapper."""

    id = "parameters-changed-after-wrapping"
    severity = Severity.ERROR
    effect = "These parameters are trained by each rank on its own data: the replicas drift apart."
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield one finding for each wrapper with parameters that are not its own."""
        num_steps = len(observed.by_rank(StepTaken)[0]) if observed.world_size else 0
        for (wrapper, cause), differing in differences_by_cause(observed).items():
            if cause is Cause.PARAMETERS_CHANGED:
                yield self.finding(
                    _place(observed, modules, wrapper, differing[0]),
                    f"DistributedDataParallel does not know {named(differing[0].names)}: they came after wrapping.",
                    describe(differing, num_steps),
                    "Wrap again after the change, `model = DistributedDataParallel(net)`, or change before wrapping.",
                )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield places that unfreeze parameters below the line that wraps the model, in the same function."""
        wrapped = assigned_from(module, DDP)
        calls = {id(call): call for call in wrapped.values()}.values()
        for line, node in _unfreezings(module):
            before = [call for call in calls if scope_of(module, call.node) is scope_of(module, node)]
            if before and all(call.node.lineno < line for call in before):
                yield self.finding(
                    module.place(node),
                    "Parameters are unfrozen after DistributedDataParallel was built, which does not reduce them.",
                    module.line(line),
                    "Unfreeze before wrapping, or wrap again after this line.",
                    Severity.WARNING,
                )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines that ran without harm."""
        return observed.has_at(WrapperChanged, finding.place)


def _changes(observed: Observed) -> list[WrapperChanged]:
    return [change for changes in observed.by_rank(WrapperChanged) for change in changes]


def _place(
    observed: Observed, modules: Sequence[SourceModule], wrapper: int, difference: Difference
) -> tuple[str, int]:
    """Return where the change was made, as far as it is known; else where the model was wrapped."""
    wrapped = wrappers_of(observed)[wrapper]
    for change in _changes(observed):
        if change.wrapper == wrapper and any(name.startswith(change.name) for name in difference.names):
            return _call_of_helper(modules, change, wrapped) or (change.file, change.line)
    for module in modules:
        for line, _ in _unfreezings(module):
            if module.path == wrapped.file and line > wrapped.line:
                return module.path, line
    return wrapped.file, wrapped.line


def _call_of_helper(
    modules: Sequence[SourceModule], change: WrapperChanged, wrapped: ModelWrapped
) -> tuple[str, int] | None:
    """Return the call, below the line that wraps, of a helper that freezes or unfreezes as it is told."""
    for module in (one for one in modules if one.path == change.file == wrapped.file):
        for call in module.calls_of("requires_grad_"):
            function, value = function_around(module, call.node), call.argument("requires_grad", 0)
            if call.node.lineno != change.line or not isinstance(function, Function) or not isinstance(value, ast.Name):
                continue
            for site in call_sites(module, function):
                is_told_not_to = any(isinstance(v, ast.Constant) and v.value is False for v in _given(site))
                if site.node.lineno > wrapped.line and not is_told_not_to:
                    return module.place(site.node)
    return None


def _given(call: Call) -> list[ast.expr]:
    return [*call.node.args, *(keyword.value for keyword in call.node.keywords)]


def _unfreezings(module: SourceModule) -> Iterable[tuple[int, ast.expr]]:
    """Yield what sets `requires_grad` to True."""
    for call in module.calls_of("requires_grad_"):
        value = call.argument("requires_grad", 0)
        if value is None or (isinstance(value, ast.Constant) and value.value is True):
            yield call.node.lineno, call.node
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                    yield node.lineno, target
