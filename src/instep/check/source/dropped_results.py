"""Where the source lets the result of a collective go: it is filled into something that nobody reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    assignments,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    loops_around,
    names_in,
)
from instep.check.source.module import Call, SourceModule

_IN_PLACE = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
_LISTS = ("broadcast_object_list", "all_gather_object", "all_gather")
_RETURNS = ("gather", "gather_for_metrics", "reduce", "all_gather", "all_reduce")
"""Methods of Accelerate, Fabric and Lightning that return what they bring together, and change nothing."""
_NEW = frozenset(
    (
        *("tensor", "as_tensor", "FloatTensor", "LongTensor", "DoubleTensor", "stack", "cat", "clone", "sum", "mean"),
        *("norm", "var", "std", "max", "min", "bincount", "abs", "sqrt", "exp", "log", "argmax", "full"),
    )
)
"""Functions and methods that make a tensor of its own."""
_SAME = frozenset(("detach", "view", "view_as", "flatten", "contiguous", "to", "float", "double", "cpu", "cuda"))
"""Methods that may return the tensor itself, or a view of it."""
_CONFIGURED = frozenset(("device", "dtype", "rank", "world_size", "local_rank", "torch", "np", "dist"))
_READS_INTO = (ast.Subscript, ast.Attribute)


def dropped_results(module: SourceModule) -> Iterator[tuple[ast.Call, str]]:
    """Yield collectives whose result is lost, with what it was filled into."""
    for call in module.calls:
        statement = next(module.statements_around(call.node), None)
        is_alone = isinstance(statement, ast.Expr) and statement.value is call.node
        what = _returned(module, call) if is_alone else ""
        if not what and is_collective(call) and (is_alone or _starts(call)):
            what = _filled(module, call)
        if what:
            yield call.node, what


def _starts(call: Call) -> bool:
    flag = call.argument("async_op")
    return isinstance(flag, ast.Constant) and flag.value is True


def _returned(module: SourceModule, call: Call) -> str:
    """Return what is lost where a function returns it; empty: the function fills it into its argument."""
    owner = call.name.rpartition(".")[0].rpartition(".")[2]
    has_value = bool(call.node.args) and not isinstance(call.node.args[0], ast.Constant)
    if owner in ("accelerator", "fabric", "functional", "funcol") and call.last in _RETURNS and has_value:
        return f"what `{call.last}` returns"
    is_plain = isinstance(call.node.func, ast.Name) and not is_imported(module, call)
    own = functions_named(module, call.last) if is_plain else []
    if len(own) == 1 and _returns_only(module, own[0]):
        return f"what `{call.last}` returns"
    return ""


def _returns_only(module: SourceModule, function: Function) -> bool:
    """Return whether a function reduces a tensor that it has made, returns it, and does nothing else that is seen."""
    made = {name for names, value in assignments(function) if _is_new(module, value) for name in names}
    reduced = [call for call in calls_in(module, function) if is_collective(call)]
    filled = [_name(call.argument("tensor", 0)) for call in reduced]
    returned = {
        inner.id
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
        for inner in ast.walk(node.value)
        if isinstance(inner, ast.Name)
    }
    others = [
        call
        for call in calls_in(module, function)
        if call.last in ("append", "update", "print", "add_scalar", "log", "copy_", "info", "write", "backward")
    ]
    stores = any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in ast.walk(function))
    return bool(filled) and all(name in made and name in returned for name in filled) and not others and not stores


def _filled(module: SourceModule, call: Call) -> str:
    """Return what a collective fills that nothing reads afterwards; empty: something may."""
    target = _target(call)
    if target is None:
        return ""
    if call.last in _LISTS:
        if isinstance(target, ast.List | ast.ListComp | ast.BinOp) and _has_value(target, call):
            return f"`{ast.unparse(target)}`, a list that has no name"
    elif _is_new(module, target) and _has_value(target, call):
        return f"`{ast.unparse(target)}`, a tensor that has no name"
    if not isinstance(target, ast.Name) or not _is_made_here(module, call, target.id):
        return ""
    return f"`{target.id}`, which nothing reads afterwards" if not _is_read_later(module, call, target) else ""


def _target(call: Call) -> ast.expr | None:
    """Return what a collective writes to on all ranks."""
    names: tuple[str, ...]
    if call.last in _LISTS:
        names = ("object_list", "tensor_list")
    elif call.last in _IN_PLACE:
        names = ("tensor", "output_tensor", "output")
    else:
        return None
    return next((value for name in names if (value := call.argument(name, 0)) is not None), None)


def _is_new(module: SourceModule, value: ast.expr) -> bool:
    """Return whether an expression makes a tensor that nothing else holds."""
    if isinstance(value, ast.BinOp):
        return not any(isinstance(part, ast.List) for part in (value.left, value.right))
    if not isinstance(value, ast.Call):
        return False
    call = module.call_of[value]
    if call.last in _NEW:
        return True
    is_method = isinstance(value.func, ast.Attribute)
    return call.last in _SAME and is_method and _is_new(module, value.func.value)  # type: ignore[attr-defined]


def _has_value(target: ast.expr, call: Call) -> bool:
    """Return whether an argument holds a variable: a constant is reduced to wait for the others, or to warm up."""
    if call.last == "all_gather_object":
        return len(call.node.args) > 1 and not isinstance(call.node.args[1], ast.Constant)
    names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return bool(names - _CONFIGURED)


def _is_made_here(module: SourceModule, call: Call, name: str) -> bool:
    """Return whether a variable is always set in the same function, to something that nothing else holds."""
    scope = function_around(module, call.node)
    loops = [loop for loop in ast.walk(scope) if isinstance(loop, ast.For)]
    values = [value for names, value in assignments(scope) if name in names]
    is_of_loop = any(name in names_in(loop.target) for loop in loops)
    plain = [value for value in values if _is_new(module, value) or isinstance(value, ast.List | ast.ListComp)]
    is_list = call.last in _LISTS
    lists = [value for value in values if isinstance(value, ast.BinOp | ast.List | ast.ListComp)]
    is_new = bool(values) and len(lists if is_list else plain) == len(values) and not is_of_loop
    return is_new and any(_has_value(value, call) for value in values)


def _is_read_later(module: SourceModule, call: Call, target: ast.Name) -> bool:
    """Return whether anything reads a variable after a collective, in this turn of its loop or a later one."""
    scope = function_around(module, call.node)
    end = call.node.end_lineno or call.node.lineno
    inside = set(ast.walk(call.node))
    uses = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == target.id]
    reads = [node for node in uses if isinstance(node.ctx, ast.Load) and node not in inside]
    if any(node.lineno > end or (node.lineno == end and node.col_offset > call.node.col_offset) for node in reads):
        return True
    held = [names for names, value in assignments(scope) if _holds(value, target.id)]
    if held or not isinstance(scope, Function):  # another name for it, or a list that has it
        return True
    if any(isinstance(node, ast.Global | ast.Nonlocal) and target.id in node.names for node in ast.walk(scope)):
        return True
    loop = next(loops_around(module, call.node), None)
    again = set(ast.walk(loop)) if loop is not None else set()
    sets = [node.lineno for node in uses if isinstance(node.ctx, ast.Store) and node in again]
    return any(node in again and not any(line <= node.lineno for line in sets) for node in reads)


def _holds(value: ast.expr, name: str) -> bool:
    """Return whether an expression may hold a variable's own tensor: a plain name, a view, a list with it."""
    if isinstance(value, ast.Name):
        return value.id == name
    if isinstance(value, ast.List | ast.Tuple):
        return any(_holds(element, name) for element in value.elts)
    if isinstance(value, ast.Dict):
        return any(_holds(element, name) for element in value.values)
    if isinstance(value, _READS_INTO):
        return _holds(value.value, name)
    is_method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return is_method and value.func.attr in _SAME and _holds(value.func.value, name)  # type: ignore[attr-defined]


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""
