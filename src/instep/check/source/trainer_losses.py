"""Where `compute_loss` of a Hugging Face Trainer divides by the items of all processes, whose gradients are averaged.

The Trainer's own `compute_loss` multiplies by the number of processes; a method that replaces it has to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import Function, assignments, calls_in, names_in
from instep.check.source.global_counts import WORLD
from instep.check.source.module import SourceModule

_ITEMS = "num_items_in_batch"
_DIVIDES = ("div", "div_", "true_divide")


def losses_by_items_of_all(module: SourceModule) -> Iterator[ast.expr | ast.AugAssign]:
    """Yield divisions of a summed loss by `num_items_in_batch` in classes that never mention the world size."""
    if not any(name.startswith("transformers") for name in module.aliases.values()) or _counts_apart(module):
        return
    for owner in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
        is_trainer = any(ast.unparse(base).endswith("Trainer") for base in owner.bases)
        if not is_trainer or any(WORLD.search(name) for name in names_in(owner)):
            continue
        for method in owner.body:
            if isinstance(method, Function) and method.name == "compute_loss" and _takes_items(method):
                yield from _divisions(module, method)


def _counts_apart(module: SourceModule) -> bool:
    """Return whether the Trainer is told that each process counts its own items."""
    settings = (call.argument("average_tokens_across_devices") for call in module.calls)
    return any(isinstance(value, ast.Constant) and value.value is False for value in settings)


def _takes_items(method: Function) -> bool:
    return _ITEMS in {item.arg for item in [*method.args.args, *method.args.kwonlyargs]}


def _divisions(module: SourceModule, method: Function) -> Iterator[ast.expr | ast.AugAssign]:
    counts = {_ITEMS}
    for targets, value in assignments(method):
        if isinstance(value, ast.IfExp | ast.BoolOp | ast.Name | ast.Call) and _ITEMS in names_in(value):
            is_loss = any(isinstance(node, ast.BinOp) for node in ast.walk(value))
            counts |= set() if is_loss or "loss" in " ".join(targets) else targets
    for node in ast.walk(method):
        division = _division(module, node)
        if division is not None and names_in(division[1]) & counts and _is_sum(module, method, *division):
            assert isinstance(node, ast.expr | ast.AugAssign)
            yield node
            return


def _division(module: SourceModule, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Return what a node divides, and by what; None: it is no division."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.target, node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        return (node.func.value, node.args[0]) if module.call_of[node].last in _DIVIDES else None
    return None


def _is_sum(module: SourceModule, method: Function, dividend: ast.expr, divisor: ast.expr) -> bool:
    """Return whether a loss is a sum over items, as far as the calls that lead to it in the method tell."""
    names, values = names_in(dividend), [dividend]
    for _ in range(3):
        for targets, value in assignments(method):
            if targets & names and value not in values and divisor not in set(ast.walk(value)):
                values.append(value)
                names |= names_in(value)
    return any(
        isinstance(kind := call.argument("reduction"), ast.Constant) and kind.value == "sum"
        for value in values
        for call in calls_in(module, value)
    ) or any(call.last == "sum" and not call.node.args for value in values for call in calls_in(module, value))
