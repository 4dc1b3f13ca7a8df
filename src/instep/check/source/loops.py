"""Loops in the source: which one goes over epochs, and what is executed in it. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from instep.check.source.module import SourceModule

Loop = ast.For | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(modules: Sequence[SourceModule], file: str) -> SourceModule | None:
    """Return the module that a file was parsed to; None: it was not."""
    return next((module for module in modules if module.path == file), None)


def statement_at(module: SourceModule, line: int) -> ast.stmt | None:
    """Return the innermost statement that a line belongs to."""
    innermost: ast.stmt | None = None
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if innermost is None or node.lineno >= innermost.lineno:
            innermost = node
    return innermost


def loops_around(module: SourceModule, node: ast.AST) -> list[Loop]:
    """Return the loops that enclose a node in its function, from the inside out."""
    loops: list[Loop] = []
    for outer in module.around(node):
        if isinstance(outer, Function):
            break
        if isinstance(outer, Loop):
            loops.append(outer)
    return loops


def function_around(module: SourceModule, node: ast.AST) -> Function | None:
    """Return the function that encloses a node; None: it is at the top of the file."""
    return next((outer for outer in module.around(node) if isinstance(outer, Function)), None)


def epoch_loop(module: SourceModule, line: int) -> Loop | None:
    """Return the loop that goes over epochs around the batch loop of a training step at `line`; None: there is none."""
    node = statement_at(module, line)
    if node is None:
        return None
    loops = loops_around(module, node)
    if len(loops) > 1:
        return loops[-1]
    if not loops or (function := function_around(module, node)) is None:
        return None
    for call in module.calls_of(function.name):
        if outer := loops_around(module, call.node):
            return outer[-1]
    return None


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield everything inside a node, except what is inside functions that it defines."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield from within(child)
