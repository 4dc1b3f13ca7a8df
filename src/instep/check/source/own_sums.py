"""Whether a variable is a rank's own sum: it begins at zero for each epoch, or a collective brings it together."""

from __future__ import annotations

import ast

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import calls_in, loops_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import definitions, syncs

_ZEROS = ("zeros", "zeros_like", "new_zeros", "zero_")


def is_own_sum(module: SourceModule, function: str, name: str) -> bool:
    """Return whether a function's variable is a sum of its rank that may differ from those of the others."""
    scopes = module.functions.get(function, [])
    scope = scopes[0] if len(scopes) == 1 else module.tree
    begins = [one for one in definitions(scope, name) if any(True for _ in loops_around(module, one.statement))]
    if any(_is_zero(module, one.value) for one in begins if not isinstance(one.statement, ast.AugAssign)):
        return True
    return any(name in _given(call) for call in calls_in(module, scope) if _brings_together(call))


def _is_zero(module: SourceModule, value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value == 0 and not isinstance(value.value, bool)
    return isinstance(value, ast.Call) and module.call_of[value].last in _ZEROS


def _brings_together(call: Call) -> bool:
    """Return whether a call adds or gathers the ranks' values: a broadcast makes no sum."""
    return (is_collective(call) or syncs(call)) and "broadcast" not in call.last and "barrier" not in call.last


def _given(call: Call) -> set[str]:
    return {name for value in [*call.node.args, *(one.value for one in call.node.keywords)] for name in names_in(value)}
