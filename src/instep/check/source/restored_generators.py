"""Where the source gives all ranks the state of a random generator that one of them has saved."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import guard_of_callers, mentions_rank
from instep.check.source.reaching import syncs

_RESTORES = ("set_rng_state", "set_rng_state_all", "setstate", "set_state")
_SEEDS = ("manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all")


def restored_generators(module: SourceModule) -> Iterator[Call]:
    """Yield calls that restore a generator from a checkpoint which is the same for all ranks."""
    for call in module.calls_of(*_RESTORES):
        given = call.node.args[0] if call.node.args else None
        if given is None or guard_of_callers(module, call.node) is not None:
            continue
        scope = function_around(module, call.node)
        sources = _sources(scope, given)
        if not any(_is_entry(value) for value in sources) or any(mentions_rank(value) for value in sources):
            continue
        calls = list(calls_in(module, scope))
        if any(syncs(one) or "scatter" in one.last for one in calls):
            continue
        if any(one.last in _SEEDS and mentions_rank(one.node) for one in calls if one.node.lineno > call.node.lineno):
            continue
        if not any(_path_differs(module, one) for one in module.calls if one.last == "load"):
            yield call


def _sources(scope: ast.AST, given: ast.expr) -> list[ast.expr]:
    sources = [given]
    for _ in range(3):
        names = {name for value in sources for name in names_in(value)} - {"torch", "np", "numpy", "random", "cuda"}
        sources += [value for targets, value in assignments(scope) if targets & names and value not in sources]
    return sources


def _is_entry(value: ast.expr) -> bool:
    """Return whether a value is taken from a checkpoint by its name: `state["rng"]`, `state.get("rng")`."""
    for node in ast.walk(value):
        if isinstance(node, ast.Subscript) and _is_text(node.slice):
            return True
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr in ("get", "pop") and node.args and _is_text(node.args[0]):  # type: ignore[attr-defined]
            return True
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _path_differs(module: SourceModule, load: Call) -> bool:
    path = load.argument("f", 0)
    if path is None or mentions_rank(path):
        return path is not None
    names = names_in(path)
    return any(names & targets and mentions_rank(value) for targets, value in assignments(module.tree))
