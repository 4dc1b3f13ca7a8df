"""Where a contrastive loss has scores against the rows of all ranks, and labels that are those of the first one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.functions import Function, assignments, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import mentions_rank

_GATHERS = re.compile(r"gather", re.IGNORECASE)
_PRODUCTS = ("matmul", "mm", "einsum", "linear", "cosine_similarity", "cdist")


def labels_without_offset(module: SourceModule) -> Iterator[Call]:
    """Yield losses whose scores are of the rank's rows against gathered ones, with labels counted from zero."""
    for call in module.calls:
        if call.last not in ("cross_entropy", "CrossEntropyLoss", "criterion", "loss_fn") or len(call.node.args) < 2:
            continue
        scope = function_around(module, call.node)
        if not isinstance(scope, Function) or mentions_rank(scope):
            continue
        gathered = _gathered(module, scope)
        scores = [call.node.args[0], *_set_to(scope, call.node.args[0])]
        labels = [call.node.args[1], *_set_to(scope, call.node.args[1])]
        counts = [inner for value in labels for inner in calls_in(module, value) if inner.last == "arange"]
        if not gathered or not counts or not any(_is_against(module, value, gathered) for value in scores):
            continue
        if not any(gathered & names_in(count.node) for count in counts):
            yield call


def _gathered(module: SourceModule, scope: Function) -> set[str]:
    """Return the variables that hold rows of all ranks."""
    names: set[str] = set()
    for _ in range(3):
        for targets, value in assignments(scope):
            if any(_GATHERS.search(call.name) for call in calls_in(module, value)) or names & names_in(value):
                is_product = any(
                    isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) for node in ast.walk(value)
                )
                names |= set() if is_product else targets
    return names


def _is_against(module: SourceModule, value: ast.expr, gathered: set[str]) -> bool:
    """Return whether a value is a product of one side that is not gathered with one that is."""
    for node in ast.walk(value):
        sides: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Call) and module.call_of[node].last in _PRODUCTS:
            sides = node.args[-2:]
        if len(sides) == 2 and sum(bool(gathered & names_in(side)) for side in sides) == 1:
            return True
    return False


def _set_to(scope: ast.AST, value: ast.expr) -> list[ast.expr]:
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return [source for targets, source in assignments(scope) if targets & names]
