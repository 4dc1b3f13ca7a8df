"""Where an evaluation looks for the nearest samples among those of this rank alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective, is_distributed
from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    names_in,
)
from instep.check.source.local_metrics import has_all_data
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import syncs
from instep.check.source.shard_metrics import divides_evaluation

_COMPARES = ("cdist", "matmul", "mm", "cosine_similarity", "kneighbors", "pairwise_distances")
_CHOOSES = ("topk", "argmax", "argmin", "argsort", "sort", "kneighbors", "max", "min")
_JOINS = ("cat", "concat", "concatenate", "vstack")


def local_galleries(module: SourceModule) -> Iterator[tuple[ast.expr, str]]:
    """Yield comparisons with the features of this rank's samples, from which the nearest are chosen, with these."""
    if not is_distributed(module) or not divides_evaluation(module):
        return
    for scope in {function_around(module, call.node): None for call in module.calls_of(*_CHOOSES)}:
        calls = list(calls_in(module, scope))
        if not isinstance(scope, Function) or any(call.last == "backward" for call in calls):
            continue
        galleries = _galleries(module, scope)
        for node in ast.walk(scope) if galleries else ():
            other = _compared_with(module, node)
            searched = names_in(other) & galleries if other is not None else set()
            if isinstance(node, ast.expr) and searched:
                yield node, min(searched)
                break


def _galleries(module: SourceModule, scope: Function) -> set[str]:
    """Return the variables of a function that hold what a loop over this rank's batches has collected."""
    together = [call for call in calls_in(module, scope) if _brings_together(module, call)]
    shared = {name for call in together for argument in call.node.args for name in names_in(argument)}
    sites = call_sites(module, scope)
    is_whole = bool(sites) and all(has_all_data(module, site) for site in sites)
    galleries: set[str] = set()
    for targets, value in assignments(scope):
        for call in calls_in(module, value):
            own = [] if is_imported(module, call) else functions_named(module, call.last)
            collects = any(_returns_collected(module, function) for function in own) and not has_all_data(module, call)
            if collects or (not is_whole and _collects(module, scope, call)):
                galleries |= targets
        if any(_brings_together(module, call) for call in calls_in(module, value)):
            shared |= targets
    return galleries - shared


def _brings_together(module: SourceModule, call: Call) -> bool:
    own = [] if is_imported(module, call) else functions_named(module, call.last)
    return (
        is_collective(call)
        or syncs(call)
        or any(is_collective(inner) or syncs(inner) for function in own for inner in calls_in(module, function))
    )


def _returns_collected(module: SourceModule, function: Function) -> bool:
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return any(_collects(module, function, call) for value in returned for call in calls_in(module, value))


def _collects(module: SourceModule, scope: Function, call: Call) -> bool:
    """Return whether a call joins what a loop has appended to a list, or a comprehension has made."""
    if call.last not in _JOINS or not call.node.args:
        return False
    joined = call.node.args[0]
    if isinstance(joined, ast.ListComp | ast.GeneratorExp):
        return True
    return isinstance(joined, ast.Name) and any(
        fill.last == "append"
        and fill.name.rpartition(".")[0] == joined.id
        and any(isinstance(outer, ast.For) for outer in module.around(fill.node))
        for fill in calls_in(module, scope)
    )


def _compared_with(module: SourceModule, node: ast.AST) -> ast.expr | None:
    """Return the second of two things whose rows are compared with each other; None: a node does no such thing."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.right
    if isinstance(node, ast.Call) and module.call_of[node].last in _COMPARES:
        owner = node.func.value if isinstance(node.func, ast.Attribute) and len(node.args) == 1 else None
        return node.args[-1] if owner is not None or len(node.args) >= 2 else None
    return None
