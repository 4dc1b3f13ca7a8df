"""Numbers that an evaluation returned, and that were not the same on all ranks when the training went on. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep.check.live_paths import LivePath, live_paths
from instep.check.observations import Observed
from instep.check.passes import evaluations, is_divided
from instep.check.source.functions import (
    Function,
    call_sites,
    calls_below,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    names_in,
)
from instep.check.source.loops import module_of
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import mentions_rank, rank_guard
from instep.check.source.reaching import Definition, definitions

_REPORTS = (
    *("print", "info", "log", "log_metrics", "add_scalar", "add_scalars", "write", "report", "echo", "log_dict"),
    *("debug", "warning", "set_postfix", "writerow", "dump"),
)
_EVALUATES = ("no_grad", "inference_mode", "eval", "set_grad_enabled")
_ORDERED = (ast.Lt, ast.Gt, ast.LtE, ast.GtE)


@dataclass(frozen=True)
class EvaluatedMetric:
    """A variable that an evaluation sets, whose values differed by rank, and the uses for which that matters."""

    path: LivePath
    place: tuple[str, int]
    """Where it is set."""
    decision: tuple[str, int] | None
    """Where it is compared; None: nowhere."""
    is_reported: bool


def evaluated_metrics(observed: Observed, modules: Sequence[SourceModule]) -> Iterator[EvaluatedMetric]:
    """Yield the metrics of a rank's own samples that are reported, or decide about something."""
    seen = evaluations(observed)
    if seen and not any(is_divided(group) for group in seen):
        return  # all ranks evaluate everything
    done: set[tuple[str, int]] = set()
    for path in live_paths(observed, "numbers", ("evaluated", "left")):
        module = module_of(modules, path.file)
        if module is None or not path.differs_in_numbers or "local" in path.text:
            continue
        scope = _scope(module, path)
        defined = [one for one in definitions(scope, _variable(path)) if _is_evaluation(module, scope, one)]
        if not defined or (place := (module.path, defined[-1].statement.lineno)) in done:
            continue
        is_of_one = all(
            rank_guard(module, one.statement) is not None for one in defined
        )  # a best value, kept by rank 0
        decision = _decision(module, scope, path, is_of_one)
        is_reported = not is_of_one and _is_reported(module, scope, path)
        if decision is not None or is_reported:
            done.add(place)
            yield EvaluatedMetric(path, place, decision, is_reported)


def is_of_evaluation(module: SourceModule, path: LivePath) -> bool:
    """Return whether a function that evaluates has set what a path names, on all ranks."""
    scope = _scope(module, path)
    defined = [one for one in definitions(scope, _variable(path)) if _is_evaluation(module, scope, one)]
    return any(rank_guard(module, one.statement) is None for one in defined)


def _variable(path: LivePath) -> str:
    return path.names[1] if path.names[0] == "self" and len(path.names) > 1 else path.names[0]


def _scope(module: SourceModule, path: LivePath) -> ast.AST:
    functions = module.functions.get(path.function, [])
    return functions[0] if len(functions) == 1 and path.names[0] != "self" else module.tree


def _is_evaluation(module: SourceModule, scope: ast.AST, definition: Definition, depth: int = 2) -> bool:
    """Return whether a value comes from a function of this file that evaluates, directly or by other variables."""
    value = definition.value
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    if any(
        _evaluates(module, function)
        for part in parts
        for call in calls_in(module, part)
        for function in _functions(module, call)
    ):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    line = definition.statement.lineno
    return depth > 0 and any(
        _is_evaluation(module, scope, source, depth - 1)
        for name in sorted(names)
        for source in definitions(scope, name)
        if source.statement.lineno < line
    )


def _functions(module: SourceModule, call: Call) -> list[Function]:
    if is_imported(module, call):
        return []
    named = functions_named(module, call.last)
    if named:
        return named
    classes = [
        node
        for values in (module.assigned.get(call.last, []),)
        for value in values
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name in names_in(value)
    ]
    return [item for owner in classes for item in owner.body if isinstance(item, Function) and item.name == "__call__"]


def _evaluates(module: SourceModule, function: Function) -> bool:
    decorators = {name for decorator in function.decorator_list for name in names_in(decorator)}
    calls = {call.last for call in calls_below(module, function, 2)}
    has_gradients = any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(function))
    return bool((decorators | calls) & set(_EVALUATES)) and "backward" not in calls and not has_gradients


def _mentions(node: ast.AST, path: LivePath) -> bool:
    """Return whether code uses a variable: of a dict, the same key."""
    name, is_plain = _variable(path), len(path.names) == 1 or (path.names[0] == "self" and len(path.names) == 2)
    for inner in ast.walk(node):
        is_entry = isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant)
        if is_entry and _last(inner.value) == name and str(inner.slice.value) == path.names[-1]:  # type: ignore[attr-defined]
            return True
        if is_plain and isinstance(inner, ast.Name | ast.Attribute) and _last(inner) == name:
            return True
    return False


def _decision(module: SourceModule, scope: ast.AST, path: LivePath, is_of_one: bool) -> tuple[str, int] | None:
    """Return where a metric is compared; of one rank's own variable, only where other ranks compare theirs, too."""
    for node in ast.walk(scope):
        if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], _ORDERED) and _mentions(node, path)):
            continue
        if not is_of_one or rank_guard(module, node) is None:
            return module.path, node.lineno
    for call in calls_in(module, scope) if not is_of_one else ():
        given = [*call.node.args, *(item.value for item in call.node.keywords)]
        positions = [index for index, value in enumerate(given) if _mentions(value, path)]
        if positions and any(_compares(function, call, positions) for function in _functions(module, call)):
            return module.place(call.node)
    return None


def _compares(function: Function, call: Call, positions: Sequence[int]) -> bool:
    parameters = [item.arg for item in function.args.args if item.arg != "self"]
    keywords = [item.arg for item in call.node.keywords]
    names = {
        (parameters[index] if index < len(parameters) else "")
        if index < len(call.node.args)
        else (keywords[index - len(call.node.args)] or "")
        for index in positions
    }
    return any(
        isinstance(node, ast.Compare) and isinstance(node.ops[0], _ORDERED) and names & names_in(node)
        for node in ast.walk(function)
    )


def _is_reported(module: SourceModule, scope: ast.AST, path: LivePath) -> bool:
    own = [call for call in calls_in(module, scope) if call.last in _REPORTS]
    if any(_mentions(call.node, path) and not mentions_rank(call.node) for call in own):
        return True
    if not isinstance(scope, Function):
        return False
    returned = any(
        isinstance(node, ast.Return) and node.value is not None and _mentions(node.value, path)
        for node in ast.walk(scope)
    )
    sites = call_sites(module, scope) if returned else []
    return any(
        call.last in _REPORTS and not mentions_rank(call.node)
        for site in sites
        for call in calls_in(module, function_around(module, site.node))
        if site.node in set(ast.walk(call.node))
    )


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
