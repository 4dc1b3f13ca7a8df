"""Where the source gives all ranks the state of a random generator that one of them has saved."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_in,
    function_around,
    names_in,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import guard_of_callers, mentions_rank
from instep.check.source.reaching import syncs

_RESTORES = ("set_rng_state", "set_rng_state_all", "setstate", "set_state")
_SEEDS = ("manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all")


def restored_generators(module: SourceModule) -> Iterator[Call]:
    """Yield calls that restore a generator from a checkpoint which is the same for all ranks.

    Where a helper restores what it is given, they are the calls of the helper.
    """
    done: set[ast.Call] = set()
    for call in module.calls_of(*_RESTORES):
        scope = function_around(module, call.node)
        given = call.node.args[0] if call.node.args else None
        if given is None:
            continue
        for site, value in _sites(module, call, scope, given):
            if site.node not in done and _is_shared(module, site, value):
                done.add(site.node)
                yield site


def _sites(
    module: SourceModule, call: Call, scope: Function | ast.Module, given: ast.expr
) -> list[tuple[Call, ast.expr]]:
    """Return a call and what it is given; where that is a parameter, the calls of its function."""
    if not isinstance(scope, Function):
        return [(call, given)]
    parameters = [item.arg for item in scope.args.args if item.arg != "self"]
    used = [name for name in parameters if name in names_in(given)]
    if not used:
        return [(call, given)]
    found: list[tuple[Call, ast.expr]] = []
    for site in call_sites(module, scope):
        value = site.argument(used[0], parameters.index(used[0]))
        if value is not None and not isinstance(value, ast.Constant):
            found.append((site, value))
    return found


def _is_shared(module: SourceModule, call: Call, given: ast.expr) -> bool:
    """Return whether all ranks restore the same state, and are not seeded apart afterwards."""
    if guard_of_callers(module, call.node) is not None:
        return False
    scope = function_around(module, call.node)
    sources = _sources(scope, given)
    is_entry = any(_is_entry(value) or _is_load(module, value) for value in sources)
    if not is_entry or any(mentions_rank(value) for value in sources):
        return False
    calls = list(calls_in(module, scope))
    if any((syncs(one) or "scatter" in one.last) and one.node.lineno < call.node.lineno for one in calls):
        return False
    if any(one.last in _SEEDS and mentions_rank(one.node) for one in calls if one.node.lineno > call.node.lineno):
        return False
    return not any(_path_differs(module, one) for one in module.calls if one.last == "load")


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


def _is_load(module: SourceModule, value: ast.expr) -> bool:
    return any(call.last == "load" for call in calls_in(module, value))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _path_differs(module: SourceModule, load: Call) -> bool:
    path = load.argument("f", 0)
    if path is None or mentions_rank(path):
        return path is not None
    names = names_in(path)
    return any(names & targets and mentions_rank(value) for targets, value in assignments(module.tree))
