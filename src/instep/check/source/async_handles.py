"""Where the source starts a collective and never waits for it, or waits for the last of several only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import COLLECTIVES
from instep.check.source.functions import Function, Loop, function_around
from instep.check.source.module import Call, SourceModule

_STARTS = ("isend", "irecv", "batch_isend_irecv")
_WAITS = ("wait", "synchronize", "is_completed", "get_future", "wait_all", "waitall")


def unwaited_calls(module: SourceModule) -> Iterator[tuple[Call, str]]:
    """Yield asynchronous collectives whose handle nothing waits for, and what becomes of the handle, in words."""
    for call in module.calls:
        if _is_asynchronous(call) and (why := _fate(module, call)):
            yield call, why


def _is_asynchronous(call: Call) -> bool:
    if call.last in _STARTS:
        return True
    flag = call.argument("async_op")
    is_true = isinstance(flag, ast.Constant) and flag.value is True
    return call.last in COLLECTIVES and call.last != "barrier" and is_true


def _fate(module: SourceModule, call: Call) -> str:
    """Return why nothing waits for a handle; empty: something does, or it is not known."""
    parent = next(iter(module.around(call.node)), None)
    if isinstance(parent, ast.Expr):
        return "its handle is dropped"
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return _fate_of_name(module, call, parent.targets[0])
    if isinstance(parent, ast.Call) and module.call_of[parent].last == "append":
        owner = parent.func.value if isinstance(parent.func, ast.Attribute) else None
        return _fate_of_list(module, call, owner) if owner is not None else ""
    if isinstance(parent, ast.ListComp):
        statement = next((outer for outer in module.around(parent) if isinstance(outer, ast.stmt)), None)
        if isinstance(statement, ast.Expr):
            return "their handles are dropped"
        if isinstance(statement, ast.Assign) and statement.value is parent and len(statement.targets) == 1:
            return _fate_of_list(module, call, statement.targets[0])
    return ""


def _fate_of_name(module: SourceModule, call: Call, target: ast.expr) -> str:
    name = _name(target)
    scope = _scope(module, call, target)
    uses = [node for node in _uses(scope, name) if node is not target]
    if not name or not uses:
        return f"`{name}` is never used" if name else ""
    loop = _loop(module, call.node)
    waits = [node for node in uses if _is_wait(module, node)]
    if len(waits) < len(uses) or loop is None or isinstance(target, ast.Subscript):
        return ""  # it is kept somewhere, too
    inside = set(ast.walk(loop))
    if not any(node in inside for node in waits):
        return f"`{name}` is overwritten in each turn of the loop, and only the last one is waited for"
    return ""


def _fate_of_list(module: SourceModule, call: Call, target: ast.expr) -> str:
    name, scope = _name(target), _scope(module, call, target)
    if not name:
        return ""
    uses = [node for node in _uses(scope, name) if isinstance(node.ctx, ast.Load)]  # type: ignore[attr-defined]
    others = [node for node in uses if not _is_append(module, node)]
    if not others:
        return f"nothing goes through `{name}`"
    if all(_is_last_waited(module, node) for node in others):
        return f"only the last handle of `{name}` is waited for"
    return ""


def _is_append(module: SourceModule, node: ast.AST) -> bool:
    outer = next(iter(module.around(node)), None)
    return isinstance(outer, ast.Attribute) and outer.attr in ("append", "clear")


def _is_last_waited(module: SourceModule, node: ast.AST) -> bool:
    """Return whether a list is used as `handles[-1].wait()`, or only to ask whether it has elements."""
    outers = iter(module.around(node))
    first, second = next(outers, None), next(outers, None)
    if isinstance(first, ast.If | ast.UnaryOp) or (isinstance(first, ast.Call) and ast.unparse(first.func) == "len"):
        return True
    is_element = isinstance(first, ast.Subscript) and not isinstance(first.slice, ast.Slice)
    return is_element and isinstance(second, ast.Attribute) and second.attr in _WAITS


def _is_wait(module: SourceModule, node: ast.AST) -> bool:
    outer = next(iter(module.around(node)), None)
    return isinstance(outer, ast.Attribute) and outer.attr in _WAITS


def _uses(scope: ast.AST, name: str) -> list[ast.expr]:
    return [node for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute) and _name(node) == name]


def _scope(module: SourceModule, call: Call, target: ast.expr) -> ast.AST:
    """Return where a handle may be waited for: for an attribute, anywhere in the file."""
    function = function_around(module, call.node)
    is_global = isinstance(function, Function) and any(
        isinstance(node, ast.Global | ast.Nonlocal) and _name(target) in node.names for node in ast.walk(function)
    )
    held = target.value if isinstance(target, ast.Subscript) else target
    return module.tree if isinstance(held, ast.Attribute) or is_global else function


def _loop(module: SourceModule, node: ast.AST) -> Loop | None:
    for outer in module.around(node):
        if isinstance(outer, Loop):
            return outer
        if isinstance(outer, Function):
            return None
    return None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
