"""Where the source reads what an asynchronous collective fills, before it waits for the handle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import COLLECTIVES
from instep.check.source.functions import Function, call_sites, function_around, is_imported
from instep.check.source.module import Call, SourceModule

_FILLS = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter"),
        *("reduce_scatter_tensor", "all_to_all", "irecv"),
    )
)
"""Collectives that write to their first argument on every rank."""
_DESCRIBES = ("shape", "device", "dtype", "size", "numel", "dim", "ndim", "is_cuda", "nbytes", "element_size", "type")
_HANDS_ON = ("append", "extend", "record_stream", "len", "id", "isinstance", "type", "add", "put", "appendleft")
"""Calls that keep a tensor or ask about it, and do not look at its elements."""


@dataclass(frozen=True)
class Started:
    """A statement that starts a collective, and the variables of the handle and of what it fills."""

    statement: ast.stmt
    handle: str
    buffer: str


def early_reads(module: SourceModule) -> Iterator[tuple[ast.Name, Started]]:
    """Yield the first read of each buffer between the start of its collective and the first use of the handle."""
    for call in module.calls:
        for started in _started(module, call):
            if (read := _first_read(module, started)) is not None:
                yield read, started


def _started(module: SourceModule, call: Call) -> Iterator[Started]:
    """Yield what a call starts: itself, or by a function of this file that returns the handle."""
    buffer = _buffer(call)
    if buffer is None:
        return
    parent = next(iter(module.around(call.node)), None)
    if (started := _kept(module, call.node, buffer.id)) is not None:
        yield started
    function = function_around(module, call.node)
    if not isinstance(function, Function) or not isinstance(parent, ast.Return):
        return
    parameters = [item.arg for item in function.args.args if item.arg != "self"]
    for site in call_sites(module, function) if buffer.id in parameters else ():
        given = site.argument(buffer.id, parameters.index(buffer.id))
        if isinstance(given, ast.Name) and (started := _kept(module, site.node, given.id)) is not None:
            yield started


def _buffer(call: Call) -> ast.Name | None:
    flag = call.argument("async_op")
    is_started = isinstance(flag, ast.Constant) and flag.value is True and call.last in COLLECTIVES
    if call.last not in _FILLS or not (is_started or call.last == "irecv"):
        return None
    names = ("tensor", "tensor_list", "output_tensor", "output", "output_tensor_list")
    given = next((value for name in names if (value := call.argument(name, 0)) is not None), None)
    return given if isinstance(given, ast.Name) else None


def _kept(module: SourceModule, node: ast.Call, buffer: str) -> Started | None:
    """Return what a handle is kept in: `work = …`, or `handles.append(…)`."""
    statement = next(module.statements_around(node), None)
    if isinstance(statement, ast.Assign) and statement.value is node and isinstance(statement.targets[0], ast.Name):
        return Started(statement, statement.targets[0].id, buffer)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and node in statement.value.args:
        called = statement.value.func
        if isinstance(called, ast.Attribute) and called.attr == "append" and isinstance(called.value, ast.Name):
            return Started(statement, called.value.id, buffer)
    return None


def _first_read(module: SourceModule, started: Started) -> ast.Name | None:
    """Return the first read after a start, in the statements that follow it in its block."""
    block = _following(module, started.statement)
    if not any(_uses_handle(statement, started.handle) for statement in block):
        return None  # nothing waits in this block: another mistake, or another way
    for statement in block:
        uses = _uses_handle(statement, started.handle)
        if uses and isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            return None  # it waits in there, or not: what comes first is not certain
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == started.buffer]
        reads = [node for node in names if _reads(module, node)]
        if uses:
            return None
        if reads:
            return min(reads, key=lambda node: (node.lineno, node.col_offset))
        if any(
            isinstance(node, ast.Name) and node.id == started.buffer and _is_set(node) for node in ast.walk(statement)
        ):
            return None
    return None


def _following(module: SourceModule, statement: ast.stmt) -> list[ast.stmt]:
    outer = next(iter(module.around(statement)), None)
    for field in ("body", "orelse", "finalbody"):
        block = getattr(outer, field, None)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []


def _uses_handle(statement: ast.stmt, handle: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == handle for node in ast.walk(statement))


def _is_set(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _reads(module: SourceModule, node: ast.Name) -> bool:
    """Return whether a use of a variable looks at its elements."""
    if _is_set(node):
        return False
    inner: ast.AST = node
    for outer in module.around(node):
        if isinstance(outer, Function | ast.Lambda | ast.Return):
            return False
        if isinstance(outer, ast.Attribute) and outer.attr in _DESCRIBES:
            return False
        if isinstance(outer, ast.Call) and outer.func is not inner:
            call = module.call_of[outer]
            is_collective = is_imported(module, call) and call.last in COLLECTIVES
            return not (call.last in _HANDS_ON or is_collective)
        if isinstance(outer, ast.BinOp | ast.Compare | ast.UnaryOp | ast.AugAssign):
            return not _asks_for_none(outer)
        if isinstance(outer, ast.Call | ast.Subscript):
            return True
        if isinstance(outer, ast.stmt):
            return False  # another name for it
        inner = outer
    return False


def _asks_for_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
