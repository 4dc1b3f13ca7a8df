"""Whether a script keeps each gathered result once: by the sample's id, in a dict, a set or with `unique`."""

from __future__ import annotations

import ast
import re

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import Function, calls_below, function_around, names_in
from instep.check.source.module import SourceModule

_ID = re.compile(r"^(.*_)?(id|ids|idx|idxs|index|indices|uid|uids)$", re.I)
_UNIQUE = ("unique", "drop_duplicates", "unique_consecutive")


def keeps_each_once(module: SourceModule) -> bool:
    """Return whether a function that gathers also keeps results by their ids."""
    scopes = {function_around(module, call.node) for call in module.calls if is_collective(call)}
    callers = [function for functions in module.functions.values() for function in functions]
    gathering = [
        scope for scope in [*scopes, *callers] if any("gather" in call.last for call in calls_below(module, scope))
    ]
    return any(_by_id(module, scope) for scope in gathering if isinstance(scope, Function))


def _by_id(module: SourceModule, scope: Function) -> bool:
    for call in calls_below(module, scope, 1):
        if call.last in _UNIQUE and any(_is_id(name) for name in names_in(call.node)):
            return True
        is_dict = call.last in ("dict", "update", "setdefault") and call.node.args
        if is_dict and any("zip" in names_in(arg) or call.last == "setdefault" for arg in call.node.args):
            return True
    for node in ast.walk(scope):
        if isinstance(node, ast.DictComp) and (any(map(_is_id, names_in(node.key))) or _is_of_parts(node)):
            return True
        is_asked = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
        if is_asked and any(_is_id(name) for name in names_in(node.left)):  # type: ignore[attr-defined]
            return True
        if isinstance(node, ast.Assign) and any(_sets_by_id(target) for target in node.targets):
            return True
    return False


def _is_of_parts(node: ast.DictComp) -> bool:
    """Return whether a dict is made of the rows of several parts, by one of their elements."""
    rows = [one.target for one in node.generators[1:] if isinstance(one.target, ast.Tuple)]
    return isinstance(node.key, ast.Name) and any(node.key.id in names_in(target) for target in rows)


def _sets_by_id(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and any(_is_id(name) for name in names_in(target.slice))


def _is_id(name: str) -> bool:
    return bool(_ID.match(name))
