"""Where the source brings the ranks' weights together by hand, and one rank's, or their sum, takes their place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    call_sites,
    calls_in,
    function_around,
    loops_around,
    names_in,
    trains,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import rank_guard

_DIVIDES = ("div", "div_", "mul", "mul_", "true_divide", "mean", "lerp_")
_WRAPS = ("DistributedDataParallel", "DDP", "fully_shard", "FullyShardedDataParallel", "prepare")


def summed_weights(module: SourceModule) -> Iterator[Call]:
    """Yield reductions of parameters by SUM in functions that divide nothing."""
    for call, scope in _of_parameters(module, "all_reduce"):
        text = ast.unparse(scope)
        divides = any(
            isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult)
            for node in ast.walk(scope)
        )
        if not divides and "AVG" not in text and not any(one.last in _DIVIDES for one in calls_in(module, scope)):
            yield call


def replaced_weights(module: SourceModule) -> Iterator[Call]:
    """Yield broadcasts of parameters in each step of a training that brings no gradients together."""
    if any(call.last in _WRAPS for call in module.calls) or any(_reduces(call) for call in module.calls):
        return
    for call, scope in _of_parameters(module, "broadcast"):
        sites = [call.node]
        if isinstance(scope, Function) and not any(one.last == "backward" for one in calls_in(module, scope)):
            sites = [site.node for site in call_sites(module, scope)]
        for site in sites:
            if any(trains(module, loop) for loop in loops_around(module, site)) and rank_guard(module, site) is None:
                yield call
                break


def _reduces(call: Call) -> bool:
    return is_collective(call) and "reduce" in call.last and ".grad" in ast.unparse(call.node)


def _of_parameters(module: SourceModule, name: str) -> Iterator[tuple[Call, ast.AST]]:
    """Yield the collectives whose tensor is each of a model's parameters in turn, with the function around."""
    for call in module.calls:
        tensor = call.argument("tensor", 0)
        if call.last != name or not is_collective(call) or tensor is None or "grad" in ast.unparse(tensor):
            continue
        operation = call.argument("op", 1) if name == "all_reduce" else None
        if operation is not None and not ast.unparse(operation).endswith("SUM"):
            continue
        for loop in loops_around(module, call.node):
            is_each = isinstance(loop, ast.For) and names_in(loop.target) & names_in(tensor)
            if is_each and names_in(loop.iter) & {"parameters", "named_parameters"}:  # type: ignore[union-attr]
                yield call, function_around(module, call.node)
                break
