"""Which assignments a use of a variable may see, and whether a collective has made the value the same on all ranks."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from instep.check.source.collective_calls import agrees
from instep.check.source.functions import (
    Function,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    loops_around,
)
from instep.check.source.module import Call, SourceModule

SYNCS = (
    *("gather_for_metrics", "all_reduce", "allreduce", "sync", "average_over_ranks", "reduce_mean", "reduce_dict"),
    *("reduce_tensor", "reduce_value", "mean_over_ranks", "all_gather", "broadcast"),
)
"""Parts of names of functions that bring the ranks' values together."""


@dataclass(frozen=True)
class Definition:
    """An assignment of a variable."""

    statement: ast.stmt | ast.expr
    value: ast.expr
    index: int | None = None
    """Which element of the value, where it is a tuple that is taken apart."""


def syncs(call: Call) -> bool:
    """Return whether a call gives the same values on all ranks, by what it is or by its name."""
    if call.last in ("gather", "reduce"):  # Accelerate's give the result to all ranks, those of torch to one
        return "accel" in call.name.lower()
    return agrees(call) or any(word in call.last.lower() for word in SYNCS)


def definitions(scope: ast.AST, name: str) -> list[Definition]:
    """Return the assignments of a variable or attribute, by its last name, in the order of their lines."""
    made: list[Definition] = []
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                made += _of_target(node, target, name)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            made += [Definition(node, node.value)] if _name(node.target) == name else []
    return sorted(made, key=lambda one: one.statement.lineno)


def reaching(module: SourceModule, name: str, use: ast.expr) -> list[Definition] | None:
    """Return the assignments in the same function that a use may see; None: the value is the same on all ranks."""
    scope = function_around(module, use)
    defined = definitions(scope, name)
    start = next((outer.lineno for outer in module.around(use) if isinstance(outer, ast.stmt)), use.lineno)
    loop = next(loops_around(module, use), None)
    agreed: list[ast.expr] = [
        call.node for call in calls_in(module, scope) if call.node.lineno < start and _agrees_on(module, call, name)
    ]
    agreed += [one.value for one in defined if one.statement.lineno < start and _has_sync(module, one.value)]
    certain = [one for one in defined if one.statement.lineno < start and _dominates(module, one, use)]
    last = max((node.lineno for node in agreed), default=0)
    if certain and certain[-1].statement.lineno > last:
        kept = [one for one in defined if certain[-1].statement.lineno <= one.statement.lineno < start]
        return kept + _carried(module, defined, start, loop, certain[-1].statement)
    if agreed:
        node = max(agreed, key=lambda item: item.lineno)
        kept = [one for one in defined if last < one.statement.lineno < start]
        kept += _carried(module, defined, start, loop, node)
        return kept or None
    return [one for one in defined if one.statement.lineno < start] + _carried(module, defined, start, loop, None)


def _carried(
    module: SourceModule, defined: list[Definition], start: int, loop: ast.AST | None, killer: ast.AST | None
) -> list[Definition]:
    """Return the later assignments that the next turn of a loop sees, unless something in each turn comes before."""
    if loop is None or (killer is not None and next(loops_around(module, killer), None) is loop):
        return []
    inside = set(ast.walk(loop))
    return [one for one in defined if one.statement.lineno >= start and one.statement in inside]


def _dominates(module: SourceModule, definition: Definition, use: ast.expr) -> bool:
    """Return whether an assignment is always executed before a use: it is in a block that contains the use."""
    if isinstance(definition.statement, ast.AugAssign | ast.NamedExpr):
        return False
    block = next(iter(module.around(definition.statement)))
    return block in set(module.around(use))


def _agrees_on(module: SourceModule, call: Call, name: str) -> bool:
    """Return whether a call makes a variable the same on all ranks, in place."""
    given = [*call.node.args[:1], *(item.value for item in call.node.keywords if "tensor" in (item.arg or ""))]
    if agrees(call):
        return any(name in _held(argument) for argument in given)
    receiver = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    if any(word in call.last.lower() for word in SYNCS):
        return (receiver is not None and _name(receiver) == name) or any(name in _held(argument) for argument in given)
    own = () if is_imported(module, call) else functions_named(module, call.last)
    return any(_reduces_parameter(module, call, function, name) for function in own)


def _reduces_parameter(module: SourceModule, call: Call, function: Function, name: str) -> bool:
    parameters = [item.arg for item in function.args.args if item.arg != "self"]
    given = [parameter for parameter, value in zip(parameters, call.node.args, strict=False) if name in _held(value)]
    reduced = [inner for inner in calls_in(module, function) if agrees(inner) and inner.node.args]
    return any(parameter in _held(inner.node.args[0]) for inner in reduced for parameter in given)


def _held(argument: ast.expr) -> set[str]:
    """Return the variables that an argument is, not those that it is computed from."""
    if isinstance(argument, ast.List | ast.Tuple):
        return {name for element in argument.elts for name in _held(element)}
    return {_name(argument)} - {""}


def _has_sync(module: SourceModule, value: ast.expr) -> bool:
    return any(syncs(call) for call in calls_in(module, value))


def _of_target(node: ast.Assign, target: ast.expr, name: str) -> list[Definition]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [Definition(node, node.value)] if _name(target) == name else []
    made: list[Definition] = []
    for index, element in enumerate(target.elts):
        if _name(element) == name:
            same = isinstance(node.value, ast.Tuple | ast.List) and len(node.value.elts) == len(target.elts)
            value = node.value.elts[index] if same else node.value  # type: ignore[attr-defined]
            made.append(Definition(node, value, None if same else index))
    return made


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript | ast.Starred):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr in ("data", "grad") else node.attr
    return node.id if isinstance(node, ast.Name) else ""
