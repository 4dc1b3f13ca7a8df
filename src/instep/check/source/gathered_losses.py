"""Whether a loss is computed from what an all_gather returned: followed forward, from the call to `backward`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from instep.check.source.functions import Function, assignments, call_sites, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.wrapped_models import is_without_gradients

_BACKWARD = ("backward", "manual_backward")
_ENDS = ("item", "tolist", "argmax", "argsort", "topk", "eq", "numpy")
"""Calls whose results carry no gradient anyway: metrics."""


def reaches_loss(module: SourceModule, line: int, lines: Iterable[int] = ()) -> bool:
    """Return whether what the all_gather of a line fills becomes part of a loss, and the own part is not put back.

    `lines`: those that called it, as the run has shown; empty: not known.
    """
    call = next((one for one in module.calls if "all_gather" in one.last and _covers(one, line)), None)
    if call is None or not call.node.args or _is_in_autograd(module, call) or _is_put_back(module, call):
        return False
    source = call.node.args[1] if len(call.node.args) > 1 else None
    if source is not None and any(inner.last in ("detach", "item") for inner in calls_in(module, source)):
        return False  # on purpose
    return _follow(
        module, function_around(module, call.node), names_in(call.node.args[0]) - {"torch"}, 4, frozenset(lines)
    )


def _follow(module: SourceModule, scope: ast.AST, names: set[str], depth: int, lines: frozenset[int]) -> bool:
    """Return whether one of some variables of a function leads to a loss, there or in its callers."""
    reached = set(names)
    for _ in range(5):
        for targets, value in assignments(scope):
            if _mentions(module, value, reached) and not is_without_gradients(module, value):
                reached |= targets
        for call in calls_in(module, scope):
            if call.last in ("append", "extend") and call.node.args and _mentions(module, call.node.args[0], reached):
                reached.add(call.name.rpartition(".")[0])
    if any(_is_loss(module, call, reached) for call in calls_in(module, scope) if call.last in _BACKWARD):
        return True
    if not isinstance(scope, Function) or not depth:
        return False
    return any(_returned_to_loss(module, scope, node, reached, depth, lines) for node in ast.walk(scope))


def _returned_to_loss(
    module: SourceModule, scope: Function, node: ast.AST, reached: set[str], depth: int, lines: frozenset[int]
) -> bool:
    if not isinstance(node, ast.Return) or node.value is None or not _mentions(module, node.value, reached):
        return False
    parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
    indices = {index for index, part in enumerate(parts) if _mentions(module, part, reached)}
    name = scope.name if scope.name not in ("forward", "__call__") else ""
    sites = call_sites(module, scope) if name else _calls_of_class(module, scope)
    return any(_follow_site(module, site, indices, depth, lines) for site in sites)


def _calls_of_class(module: SourceModule, scope: Function) -> list[Call]:
    """Return the calls of objects of the class that a `forward` belongs to: `criterion(x)`."""
    owner = next((outer.name for outer in module.around(scope) if isinstance(outer, ast.ClassDef)), "")
    made = {name for targets, value in assignments(module.tree) if owner in names_in(value) for name in targets}
    return [call for call in module.calls if call.last in made]


def _follow_site(module: SourceModule, site: Call, indices: set[int], depth: int, lines: frozenset[int]) -> bool:
    scope = function_around(module, site.node)
    if is_without_gradients(module, site.node) or (lines and not any(_covers(site, line) for line in lines)):
        return False
    around = [outer for outer in module.around(site.node) if isinstance(outer, ast.Call | ast.Attribute | ast.Assign)]
    if any(isinstance(outer, ast.Call) and module.call_of[outer].last in _BACKWARD for outer in around):
        return True
    names: set[str] = set()
    statement = next((outer for outer in around if isinstance(outer, ast.Assign)), None)
    for target in statement.targets if statement is not None else ():
        elements = target.elts if isinstance(target, ast.Tuple) and indices and statement.value is site.node else []  # type: ignore[union-attr]
        chosen = [part for index, part in enumerate(elements) if index in indices] or [target]
        names |= {name for part in chosen for name in names_in(part)}
    augmented = [outer for outer in module.around(site.node) if isinstance(outer, ast.AugAssign)]
    names |= {name for outer in augmented for name in names_in(outer.target)}
    if statement is None and not augmented:
        returns = any(isinstance(outer, ast.Return) for outer in module.around(site.node))
        return (
            returns
            and isinstance(scope, Function)
            and any(
                _follow_site(module, outer, set(), depth - 1, lines) for outer in call_sites(module, scope) if depth > 0
            )
        )
    return _follow(module, scope, names, depth - 1, lines)


def _mentions(module: SourceModule, value: ast.expr, names: set[str]) -> bool:
    """Return whether an expression uses variables, other than for a number without a gradient."""
    used = {inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name)}
    used |= {inner.attr for inner in ast.walk(value) if isinstance(inner, ast.Attribute)}
    return bool(used & names) and not any(call.last in _ENDS for call in calls_in(module, value))


def _is_loss(module: SourceModule, call: Call, names: set[str]) -> bool:
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    values = [*call.node.args, *([owner] if owner is not None else [])]
    return any(_mentions(module, value, names) for value in values)


def _is_put_back(module: SourceModule, call: Call) -> bool:
    """Return whether the rank's own part is put among the gathered ones: `parts[rank] = x`."""
    names = names_in(call.node.args[0])
    for node in ast.walk(function_around(module, call.node)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Subscript) and names & names_in(target) for target in targets):
            return True
    return False


def _is_in_autograd(module: SourceModule, call: Call) -> bool:
    classes = [outer for outer in module.around(call.node) if isinstance(outer, ast.ClassDef)]
    return any(ast.unparse(base).endswith("Function") for owner in classes for base in owner.bases)


def _covers(call: Call, line: int) -> bool:
    return call.node.lineno <= line <= (call.node.end_lineno or call.node.lineno)
