"""Where a sum is divided by a count of all ranks, and the gradients of the ranks are averaged afterwards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    assignments,
    calls_below,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    names_in,
)
from instep.check.source.module import Call, SourceModule

_AVERAGES = ("DistributedDataParallel", "prepare", "prepare_model", "fully_shard", "FullyShardedDataParallel", "setup")
_DIVIDES_OTHERWISE = ("register_comm_hook", "set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
WORLD = re.compile(
    r"world|num_proc|n_?gpus?\b|num_gpus|(dp|ddp|data_parallel|dist)_?(size|degree)|replicas|num_ranks", re.I
)
_BACKWARD = ("backward", "manual_backward")


def losses_by_global_count(module: SourceModule) -> Iterator[ast.BinOp]:
    """Yield divisions of a summed loss by a count of all ranks that nothing multiplies by the world size."""
    names = {call.last for call in module.calls}
    if not names & set(_AVERAGES) or names & set(_DIVIDES_OTHERWISE):
        return
    for backward in module.calls_of(*_BACKWARD):
        scope = function_around(module, backward.node)
        if not isinstance(scope, Function) or _scales_by_world(module, scope, backward):
            continue
        counts = global_counts(module, scope)
        for value in _losses(scope, backward):
            divisions = [node for node in ast.walk(value) if isinstance(node, ast.BinOp) and divides(node, counts)]
            if divisions and _is_sum(module, scope, divisions[0].left):
                yield divisions[0]
                break


def global_counts(module: SourceModule, scope: ast.AST) -> set[str]:
    """Return the variables of a function that were summed over all ranks."""
    counts: set[str] = set()
    for call in calls_in(module, scope):
        if call.last == "all_reduce" and is_collective(call) and _sums(call) and call.node.args:
            counts |= _name(call.node.args[0])
    for targets, value in assignments(scope):
        if any(_is_global_sum(module, call) for call in calls_in(module, value)):
            counts |= targets
    for targets, value in assignments(scope):
        if isinstance(value, ast.Call) and names_in(value) & counts:  # `count.clamp(min=1)`, `max(count, 1)`
            counts |= targets if module.call_of[value].last in ("clamp", "max", "float", "item", "to") else set()
    return counts


def _is_global_sum(module: SourceModule, call: Call, depth: int = 1) -> bool:
    """Return whether a call returns a sum over ranks: Accelerate's, or a function of this file that all-reduces."""
    if call.last == "reduce" and "accel" in call.name.lower():
        kind = call.argument("reduction", 1)
        return kind is None or (isinstance(kind, ast.Constant) and kind.value == "sum")
    own = functions_named(module, call.last) if depth and not is_imported(module, call) else []
    for function in own:
        summed = global_counts(module, function) if depth else set()
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        if summed and returned and all(isinstance(value, ast.Name) and value.id in summed for value in returned):
            return True
    return False


def _sums(call: Call) -> bool:
    operation = call.argument("op", 1)
    return operation is None or ast.unparse(operation).endswith("SUM")


def _name(node: ast.expr) -> set[str]:
    return {node.id} if isinstance(node, ast.Name) else set()


def _losses(scope: ast.AST, backward: Call) -> Iterator[ast.expr]:
    """Yield the expression of which a backward pass is made, and what its variables are set to."""
    owner = backward.node.func.value if isinstance(backward.node.func, ast.Attribute) else None
    values = list(backward.node.args[:1]) or ([owner] if owner is not None else [])
    names = {name for value in values for name in names_in(value)}
    yield from values
    for targets, value in assignments(scope):
        if targets & names and value.lineno <= backward.node.lineno:
            yield value


def divides(node: ast.AST, counts: set[str]) -> bool:
    """Return whether a node is a division by one of some variables."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    return bool(names_in(node.right) & counts)


def _is_sum(module: SourceModule, scope: ast.AST, dividend: ast.expr) -> bool:
    """Return whether a loss is a sum over samples or tokens, as far as the calls that make it tell."""
    names = names_in(dividend)
    values = [dividend, *(value for targets, value in assignments(scope) if targets & names)]
    calls = [call for value in values for call in calls_below(module, value, 2)]
    return any(
        (isinstance(kind := call.argument("reduction"), ast.Constant) and kind.value == "sum")
        or (call.last == "sum" and isinstance(call.node.func, ast.Attribute) and not call.node.args)
        for call in calls
    )


def _scales_by_world(module: SourceModule, scope: Function, backward: Call) -> bool:
    """Return whether the number of ranks scales a loss, a gradient or a learning rate, or anything in a helper."""
    related = {"grad", "lr", "learning_rate", *_related(scope, backward)}
    if any(_scales(module, node) and names_in(node) & related for node in ast.walk(scope)):
        return True
    helpers = {one for call in calls_below(module, scope, 2) for one in functions_named(module, call.last)} - {scope}
    return any(_scales(module, node) for helper in helpers for node in ast.walk(helper))


def _related(scope: Function, backward: Call) -> set[str]:
    """Return the variables that the loss of a backward pass comes from."""
    related = {name for value in _losses(scope, backward) for name in names_in(value)}
    for _ in range(3):
        for targets, value in assignments(scope):
            related |= names_in(value) | targets if targets & related else set()
    return {name for name in related if not WORLD.search(name)} - {"torch", "F", "dist", "args", "self"}


def _scales(module: SourceModule, node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and module.call_of[node].last in ("mul_", "mul", "div_", "div", "mean")
    is_operation = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(
        node.op, ast.Mult | ast.Div | ast.FloorDiv
    )
    return (is_call or is_operation) and bool(WORLD.search(ast.unparse(node)))
