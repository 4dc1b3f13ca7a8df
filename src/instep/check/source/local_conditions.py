"""Conditions that may differ by rank because they depend on the rank's own data: `if num_positives > 0:`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import has_group, is_collective
from instep.check.source.functions import (
    Function,
    assignments,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    loops_around,
    names_in,
    trains,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import rank_guard
from instep.check.source.reaching import Definition, reaching, syncs

_VALUES = frozenset(
    (
        *("any", "all", "count_nonzero", "isfinite", "isinf", "isnan", "item", "max", "mean", "min", "nonzero", "norm"),
        *("numel", "sum", "tolist", "rand", "random", "randint", "uniform"),
    )
)
"""Functions whose result is a value of this rank's data, or drawn."""


@dataclass(frozen=True)
class LocalCondition:
    """An `if` that ranks may take differently, and what they would miss."""

    node: ast.If
    missed: ast.stmt | ast.expr
    """A collective that only some ranks issue, or the statement by which some ranks leave the loop's turn."""


def collectives_under_local_conditions(module: SourceModule) -> Iterator[LocalCondition]:
    """Yield collectives that a rank issues only if its own data says so."""
    for call in module.calls:
        node = _local_if(module, call.node) if is_collective(call) and not has_group(call) else None
        if node is not None and not _other_branch_has(module, node, call):
            yield LocalCondition(node, call.node)


def decided_by_one_rank(module: SourceModule) -> Iterator[tuple[ast.stmt, ast.If]]:
    """Yield statements that leave a training loop by a flag which only some ranks set, and which nothing broadcasts."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Break | ast.Return):
            continue
        if not any(trains(module, loop) for loop in loops_around(module, node)):
            continue
        name = ast.unparse(node.test)
        if not name.isidentifier() or rank_guard(module, node) is not None:
            continue
        defined = reaching(module, name, node.test) or []
        guarded = [one for one in defined if rank_guard(module, one.statement) is not None]
        others = [one for one in defined if one not in guarded]
        if not guarded or not all(isinstance(one.value, ast.Constant) for one in others):
            continue
        if not any(_has_been_sent(module, one) for one in guarded):
            yield node.body[-1], node


def _has_been_sent(module: SourceModule, definition: Definition) -> bool:
    """Return whether a variable is set from what a collective has filled before: `stop = sent[0]`."""
    names, scope = names_in(definition.value), function_around(module, definition.statement)
    sent = [call for call in calls_in(module, scope) if is_collective(call)]
    return any(
        names & names_in(argument)
        for call in sent
        for argument in call.node.args
        if call.node.lineno < definition.statement.lineno
    )


def collectives_in_handlers(module: SourceModule) -> Iterator[tuple[ast.ExceptHandler, Call]]:
    """Yield collectives that only ranks which caught an exception issue, and the others nowhere in the statement."""
    for node in ast.walk(module.tree):
        for handler in node.handlers if isinstance(node, ast.Try) else ():
            others = [call.last for item in [*node.body, *node.orelse] for call in calls_in(module, item)]  # type: ignore[attr-defined]
            for item in handler.body:
                for call in calls_in(module, item):
                    if is_collective(call) and not has_group(call) and call.last not in others:
                        yield handler, call


def collectives_over_local_keys(module: SourceModule) -> Iterator[tuple[ast.For, Call]]:
    """Yield loops over a dict that has the keys which this rank has met, with a collective inside."""
    met = {name for names, value in assignments(module.tree) if _fills_itself(value) for name in names}
    for node in ast.walk(module.tree):
        if (
            not isinstance(node, ast.For)
            or not (dicts := names_in(node.iter) & met)
            or _has_written_keys(module, dicts)
        ):
            continue
        if calls := [call for call in calls_in(module, node) if is_collective(call) and not has_group(call)]:
            yield node, calls[0]


def _has_written_keys(module: SourceModule, dicts: set[str]) -> bool:
    """Return whether a dict is filled by the names of keyword arguments: those are in the source, for all ranks."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Subscript) or not names_in(node.value) & dicts:
            continue
        function = function_around(module, node)
        given = getattr(getattr(function, "args", None), "kwarg", None)
        loops = [outer for outer in module.around(node) if isinstance(outer, ast.For)]
        if given is not None and any(given.arg in names_in(loop.iter) for loop in loops):
            return True
    return False


def _fills_itself(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("defaultdict", "Counter")
    )


def local_collectives(module: SourceModule) -> set[tuple[str, int]]:
    """Return the places of collectives that depend on a rank's own data."""
    under = {module.place(item.missed) for item in collectives_under_local_conditions(module)}
    return under | {module.place(call.node) for _, call in collectives_over_local_keys(module)}


def _local_if(module: SourceModule, node: ast.AST) -> ast.If | None:
    inner = node
    for outer in module.around(node):
        if isinstance(outer, ast.If) and inner is not outer.test and is_local(module, outer):
            return outer
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        inner = outer
    return None


def is_local(module: SourceModule, node: ast.If) -> bool:
    """Return whether a test depends on a value of this rank's data that no collective has seen before."""
    if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Is | ast.IsNot):
        return False  # whether there is a value, not which
    scope = function_around(module, node)
    names = {inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)}
    sources = [value for set_names, value in assignments(scope) if set_names & names and value.lineno < node.lineno]
    filled = {name for value in sources for name in names_in(value)} | names
    sources += [
        argument
        for call in calls_in(module, scope)
        if call.last in ("append", "extend") and call.name.rpartition(".")[0] in filled
        for argument in call.node.args
    ]
    agreed = [call for call in calls_in(module, scope) if is_collective(call) and call.node.lineno < node.lineno]
    if any(names & names_in(argument) for call in agreed for argument in call.node.args):
        return False
    if any(_agrees(module, call) for source in [node.test, *sources] for call in calls_in(module, source)):
        return False
    return any(_is_value(module, expression) for expression in [node.test, *sources])


def _agrees(module: SourceModule, call: Call) -> bool:
    """Return whether a call brings the ranks together: by what it is, or by what a function of this file does."""
    own = [] if is_imported(module, call) else functions_named(module, call.last)
    return syncs(call) or any(syncs(inner) for function in own for inner in calls_in(module, function))


def _is_value(module: SourceModule, expression: ast.expr, depth: int = 2) -> bool:
    for call in calls_in(module, expression):
        is_builtin = isinstance(call.node.func, ast.Name) and call.last in ("max", "min", "sum", "any", "all")
        if call.last in _VALUES and not is_builtin and not call.name.startswith(("os.", "args.")):
            return True
        if (
            depth
            and not is_imported(module, call)
            and any(_returns_value(module, function, depth) for function in functions_named(module, call.last))
        ):
            return True
    return False


def _returns_value(module: SourceModule, function: Function, depth: int) -> bool:
    """Return whether a function of this file returns a value of its own data, and brings no ranks together."""
    if any(syncs(call) for call in calls_in(module, function)):
        return False
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return len(returned) == 1 and any(_is_value(module, value, depth - 1) for value in returned)


def _other_branch_has(module: SourceModule, node: ast.If, call: Call) -> bool:
    branches = [node.body, node.orelse]
    others = next(branch for branch in branches if not any(call.node in set(ast.walk(item)) for item in branch))
    return any(other.last == call.last for item in others for other in calls_in(module, item))
