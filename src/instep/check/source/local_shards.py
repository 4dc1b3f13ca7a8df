"""Where the source computes a number of one rank's shard of a DTensor, and no collective completes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import syncs

_NORMS = ("norm", "vector_norm", "get_total_norm", "std", "var", "mean", "sum", "amax", "quantile")
_LOCAL = ("to_local", "_local_tensor")
_IN_PLACE = ("sub_", "div_", "mul_", "sub", "div", "mul")
_KEEPS = ("detach", "flatten", "view", "float", "double", "to", "clone", "reshape", "data", "pow", "square", "abs")
"""Methods after which every element is still there."""
_COMPLETES = ("full_tensor", "from_local", "redistribute")


def norms_of_shards(module: SourceModule) -> Iterator[Call]:
    """Yield the first number of each function that is made of a local shard and used as that of the whole."""
    scopes = {function_around(module, call.node): None for call in module.calls if call.last == "to_local"}
    for scope in scopes:
        calls = list(calls_in(module, scope))
        if any(syncs(call) or call.last in _COMPLETES for call in calls):
            continue
        local = _local_names(scope)
        norms = (call for call in calls if call.last in _NORMS and _is_of_shard(call, local))
        norm = next((call for call in norms if _computes_with(module, scope, call)), None)
        if norm is not None:
            yield norm


def _local_names(scope: ast.AST) -> set[str]:
    """Return the variables that hold local shards, or elements of lists of them."""
    local: set[str] = set()
    for _ in range(3):
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    local |= _targets(target, node.value, local)
            elif isinstance(node, ast.For | ast.comprehension) and _holds(node.iter, local):
                local |= {inner.id for inner in ast.walk(node.target) if isinstance(inner, ast.Name)}
    return local


def _targets(target: ast.expr, value: ast.expr, local: set[str]) -> set[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name for one, part in pairs for name in _targets(one, part, local)}
    return {target.id} if isinstance(target, ast.Name) and _holds(value, local) else set()


def _holds(value: ast.expr, local: set[str]) -> bool:
    """Return whether an expression is a local shard, a list of shards, or a view of one: not a number of it."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in _LOCAL or (value.func.attr in _KEEPS and _holds(value.func.value, local))
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        return _holds(value.elt, local)
    if isinstance(value, ast.IfExp):
        return _holds(value.body, local) or _holds(value.orelse, local)
    if isinstance(value, ast.BinOp):  # `g * g`, `g ** 2`
        return _holds(value.left, local)
    if isinstance(value, ast.Attribute):
        return value.attr in _LOCAL or (value.attr == "data" and _holds(value.value, local))
    return isinstance(value, ast.Name) and value.id in local


def _is_of_shard(call: Call, local: set[str]) -> bool:
    """Return whether a reduction goes over a shard: `w.norm()`, `torch.linalg.vector_norm(w)`."""
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    given = [*call.node.args[:1], *([owner] if owner is not None else [])]
    return any(_holds(value, local) for value in given)


def _computes_with(module: SourceModule, scope: ast.AST, call: Call) -> bool:
    """Return whether a quotient, a product or a difference is made of a number: `w.norm() / g.norm()`."""
    around = list(module.around(call.node))
    if any(isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div | ast.Mult | ast.Sub) for outer in around):
        return True
    if any(isinstance(outer, ast.Call) and module.call_of[outer].last in _IN_PLACE for outer in around):
        return True
    names = {name for targets, value in assignments(scope) if call.node in set(ast.walk(value)) for name in targets}
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult) and names_in(node) & names
        for node in ast.walk(scope)
    )
