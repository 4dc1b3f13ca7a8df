"""Where the source compares results that were gathered rank by rank with labels in the order of the dataset."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import Function, assignments, calls_in, function_around, names_in
from instep.check.source.module import SourceModule
from instep.check.source.rank_guards import mentions_rank

_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object")
_LABELS = ("targets", "labels", "y", "tensors", "label", "target")
_ORDERS = ("argsort", "sort", "sorted", "index_copy_", "scatter_", "transpose", "t", "permute", "zip", "dict", "chain")
_ORDERS_WORDS = ("idx", "index", "indices", "order", "ids", "perm", "inverse")


def misplaced_labels(module: SourceModule) -> Iterator[tuple[ast.expr, str]]:
    """Yield comparisons of gathered results with a dataset's own labels, under a DistributedSampler."""
    if not any(True for _ in module.calls_of("DistributedSampler")):
        return
    scopes = {function_around(module, call.node): None for call in module.calls if call.last in _GATHERS}
    for scope in scopes:
        gathers = [call for call in calls_in(module, scope) if call.last in _GATHERS and is_collective(call)]
        if not isinstance(scope, Function) or not gathers or _puts_in_order(module, scope):
            continue
        gathered = _follow(scope, {name for call in gathers for name in _filled(call.node)})
        whole = _whole_labels(scope, gathered)
        for node in ast.walk(scope):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                sides = [node.left, node.comparators[0]]
            elif isinstance(node, ast.Call) and len(node.args) >= 2:
                sides = node.args[:2]
            else:
                continue
            kinds = [_kind(side, gathered, whole) for side in sides]
            if sorted(kinds) == ["gathered", "whole"]:
                yield node, ast.unparse(sides[kinds.index("whole")])
                break


def _filled(call: ast.Call) -> set[str]:
    return {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)} if call.args else set()


def _follow(scope: ast.AST, names: set[str]) -> set[str]:
    followed = set(names)
    for _ in range(4):
        for targets, value in assignments(scope):
            if {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} & followed:
                followed |= targets
    return followed


def _whole_labels(scope: ast.AST, gathered: set[str]) -> set[str]:
    """Return the variables that hold all labels of a dataset, and were not gathered."""
    return {
        name
        for targets, value in assignments(scope)
        if _is_of_dataset(value) and not mentions_rank(value)
        for name in targets - gathered
    }


def _is_of_dataset(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in _LABELS and "data" in ast.unparse(node.value).lower()
        for node in ast.walk(value)
    )


def _kind(side: ast.expr, gathered: set[str], whole: set[str]) -> str:
    names = {node.id for node in ast.walk(side) if isinstance(node, ast.Name)}
    if names & gathered:
        return "gathered"
    return "whole" if names & whole or _is_of_dataset(side) else ""


def _puts_in_order(module: SourceModule, scope: ast.AST) -> bool:
    """Return whether a function has to do with the order of samples: it sorts, or gathers indices."""
    if any(call.last in _ORDERS for call in calls_in(module, scope)):
        return True
    if any(call.last == "stack" and call.argument("dim", 1) is not None for call in calls_in(module, scope)):
        return True
    return any(word in name.lower() for name in names_in(scope) for word in _ORDERS_WORDS)
