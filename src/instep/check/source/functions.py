"""Which function and which loops enclose a piece of code, who calls a function, and what a function calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.module import Call, SourceModule

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


def function_around(module: SourceModule, node: ast.AST) -> Function | ast.Module:
    """Return the innermost function that contains a node; the module: no function does."""
    return next((outer for outer in module.around(node) if isinstance(outer, Function)), module.tree)


def loops_around(module: SourceModule, node: ast.AST) -> Iterator[Loop]:
    """Yield the loops of the same function that contain a node, from the inside out."""
    for outer in module.around(node):
        if isinstance(outer, Function | ast.Lambda):
            return
        if isinstance(outer, Loop):
            yield outer


def calls_in(module: SourceModule, node: ast.AST) -> Iterator[Call]:
    """Yield the calls inside a node, in the order of their lines."""
    calls = [module.call_of[inner] for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return iter(sorted(calls, key=lambda call: (call.node.lineno, call.node.col_offset)))


def functions_named(module: SourceModule, name: str) -> list[Function]:
    """Return the functions and methods of this file with a name."""
    return module.functions.get(name, [])


def calls_below(module: SourceModule, node: ast.AST, depth: int = 4) -> Iterator[Call]:
    """Yield the calls inside a node, and those that functions of this file make in turn, each function once."""
    seen: set[ast.AST] = {node}
    reached = [node]
    for _ in range(depth + 1):
        callees: list[ast.AST] = []
        for place in reached:
            for call in calls_in(module, place):
                yield call
                own = () if is_imported(module, call) else functions_named(module, call.last)
                callees += [function for function in own if function not in seen]
                seen.update(own)
        reached = callees


def call_sites(module: SourceModule, function: Function) -> list[Call]:
    """Return the calls of a function, as far as its name tells."""
    return [call for call in module.calls if call.last == function.name and not is_imported(module, call)]


def is_imported(module: SourceModule, call: Call) -> bool:
    """Return whether a call is of something that this file imports, as `torch.save`."""
    node = call.node.func
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in module.aliases


def trains(module: SourceModule, loop: Loop) -> bool:
    """Return whether a loop makes backward passes, itself or in functions of this file."""
    return any(call.last in ("backward", "manual_backward") for call in calls_below(module, loop))


def names_in(node: ast.AST) -> set[str]:
    """Return the variables that a node mentions, attributes by their last part too."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def assignments(scope: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield the variables that are set in a scope, with the expression; `a += b` counts as one."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            yield {name for target in node.targets for name in _targets(target)}, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield _targets(node.target), node.value


def _targets(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return {name for element in target.elts for name in _targets(element)}
    if isinstance(target, ast.Starred | ast.Subscript):
        return _targets(target.value)
    if isinstance(target, ast.Attribute):
        return {target.attr}
    return {target.id} if isinstance(target, ast.Name) else set()
