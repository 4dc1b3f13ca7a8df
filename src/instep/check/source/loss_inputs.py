"""Which variables and attributes the losses of a file are computed from: followed back from `backward`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from instep.check.source.functions import (
    Function,
    Loop,
    assignments,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    loops_around,
    names_in,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import Definition, definitions

_BACKWARD = ("backward", "manual_backward")
_RETURNED = ("training_step", "compute_loss")
"""Methods whose result a framework gives to `backward`."""
_CALLED = ("forward", "__call__")
_MOST = 60
"""Functions that are followed."""


def loss_inputs(module: SourceModule) -> set[str]:
    """Return the names of all variables and attributes that a loss may be computed from."""
    reached: set[str] = set()
    todo: list[tuple[ast.AST, frozenset[str]]] = []
    for call in module.calls_of(*_BACKWARD):
        owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
        parts = [*call.node.args, *([owner] if owner is not None else [])]
        names = frozenset(name for part in parts for name in names_in(part))
        todo.append((function_around(module, call.node), names))
        todo += [(one, _returned(one)) for part in parts for one in _callees(module, part)]
    todo += [(function, _returned(function)) for name in _RETURNED for function in functions_named(module, name)]
    seen: set[tuple[ast.AST, frozenset[str]]] = set()
    while todo and len(seen) < _MOST:
        scope, names = todo.pop()
        if (scope, names) in seen:
            continue
        seen.add((scope, names))
        found, callees = _within(module, scope, set(names))
        reached |= found
        todo += [(one, _returned(one)) for one in callees]
    return reached - module.aliases.keys()


def outlives_batches(module: SourceModule, scope: ast.AST, name: str) -> bool:
    """Return whether a variable of a function keeps its value from batch to batch, and is changed in training."""
    if any(name in names_in(loop.target) for loop in ast.walk(scope) if isinstance(loop, ast.For)):
        return False
    loops = _batch_loops(module)
    defined = definitions(scope, name)
    plain = [one for one in defined if _is_whole(one.statement, name)]
    in_batches = [one for one in plain if any(one.statement in set(ast.walk(loop)) for loop in loops)]
    is_carried = any(name in names_in(one.value) for one in in_batches)  # `a = 0.9 * a + 0.1 * b`
    return len(defined) > 1 and (not in_batches or (is_carried and len(plain) > len(in_batches)))


def begins_anew(module: SourceModule, scope: ast.AST, name: str) -> bool:
    """Return whether a variable is set anew in each turn of an outer loop, before the batches: it is that turn's."""
    loops = _batch_loops(module)
    defined = [one for one in definitions(scope, name) if _is_whole(one.statement, name)]
    if any(one.statement in set(ast.walk(loop)) for loop in loops for one in defined):
        return False
    return any(_begins_anew(module, one, name, loops) for one in defined)


def _batch_loops(module: SourceModule) -> list[ast.AST]:
    """Return the innermost loops around backward passes; a function without a loop is called for each batch."""
    calls = module.calls_of(*_BACKWARD)
    return [next(loops_around(module, call.node), None) or function_around(module, call.node) for call in calls]


def _begins_anew(module: SourceModule, one: Definition, name: str, loops: Sequence[ast.AST]) -> bool:
    """Return whether an assignment sets a variable anew in each turn of a loop, before the turn's batches begin."""
    if name in names_in(one.value):
        return False
    turns = {
        turn
        for batches in loops
        if isinstance(batches, Loop) and one.statement.lineno < batches.lineno
        for turn in loops_around(module, batches)
    }
    for outer in module.around(one.statement):
        if outer in turns:
            return True
        if isinstance(outer, ast.If | Function):
            return False
    return False


def _is_whole(statement: ast.AST, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    elements = [inner for target in targets for inner in (getattr(target, "elts", None) or [target])]
    return any(isinstance(element, ast.Name) and element.id == name for element in elements)


def _within(module: SourceModule, scope: ast.AST, names: set[str]) -> tuple[set[str], list[Function]]:
    """Return the names of a function that lead to some of its names, and the functions that are called on the way."""
    callees: list[Function] = []
    for _ in range(6):
        before = len(names)
        for targets, value in assignments(scope):
            if targets & names:
                names |= names_in(value)
        if len(names) == before:
            break
    for targets, value in assignments(scope):
        if targets & names:
            callees += _callees(module, value)
    return names, callees


def _callees(module: SourceModule, value: ast.AST) -> Iterator[Function]:
    """Yield the functions of this file that the calls of an expression execute; `net(x)` executes its `forward`."""
    for call in calls_in(module, value):
        if is_imported(module, call):
            continue
        named = functions_named(module, call.last)
        yield from named or _methods(module, call)


def _methods(module: SourceModule, call: Call) -> Iterator[Function]:
    made = {name for one in definitions(module.tree, call.last) for name in names_in(one.value)}
    for owner in ast.walk(module.tree):
        if isinstance(owner, ast.ClassDef) and owner.name in made:
            yield from (item for item in owner.body if isinstance(item, Function) and item.name in _CALLED)


def _returned(function: ast.AST) -> frozenset[str]:
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return frozenset(name for value in values for name in names_in(value))
