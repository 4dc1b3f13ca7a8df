"""Where the source normalises a rank's part of the data by the statistics of that part."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, calls_in, function_around, loops_around, names_in, trains
from instep.check.source.hand_shards import part_of
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import syncs

_STATISTICS = ("mean", "std", "var", "std_mean", "var_mean", "amax", "amin", "median", "quantile", "nanmean", "nanstd")


def statistics_of_parts(module: SourceModule) -> Iterator[tuple[Call, ast.expr]]:
    """Yield the first statistic of each function that is one of the rank's part, with the code that takes the part."""
    done: set[ast.AST] = set()
    for call in module.calls:
        scope = function_around(module, call.node)
        if call.last not in _STATISTICS or scope in done or any(trains(module, one) for one in _loops(module, call)):
            continue
        data = _data(module, call)
        if data is None or not _normalises(scope, call, data) or _is_shared(module, scope, call):
            continue
        if (part := part_of(module, data, call.node)) is not None:
            done.add(scope)
            yield call, part


def _loops(module: SourceModule, call: Call) -> list[ast.For | ast.AsyncFor | ast.While]:
    return list(loops_around(module, call.node))


def _data(module: SourceModule, call: Call) -> ast.expr | None:
    """Return the variable that a statistic is one of: `x.mean(0)`, `torch.mean(x)`."""
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    is_module = isinstance(owner, ast.Name) and owner.id in module.aliases
    data = call.argument("input", 0) if is_module else owner
    return data if isinstance(data, ast.Name) else None


def _normalises(scope: ast.AST, call: Call, data: ast.expr) -> bool:
    """Return whether a difference or a quotient of the data and the statistic is made."""
    names = {name for targets, value in assignments(scope) if call.node in set(ast.walk(value)) for name in targets}
    for node in ast.walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
            has_data = bool(names_in(node.left) & names_in(data))
            if has_data and (call.node in set(ast.walk(node.right)) or names_in(node.right) & names):
                return True
    return False


def _is_shared(module: SourceModule, scope: ast.AST, call: Call) -> bool:
    """Return whether a collective of the same function may bring the ranks' statistics together."""
    return any(syncs(one) for one in calls_in(module, scope) if one.node is not call.node)
