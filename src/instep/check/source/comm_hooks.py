"""Where the source gives DistributedDataParallel a communication hook that sums gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import Function, calls_below, functions_named
from instep.check.source.global_counts import WORLD
from instep.check.source.module import Call, SourceModule

_DIVIDES = ("div", "div_", "mul", "mul_", "true_divide", "mean")


def summing_hooks(module: SourceModule) -> Iterator[tuple[Call, Function]]:
    """Yield the registrations of hooks of this file that all-reduce a bucket and never divide, with the hook."""
    for call in module.calls_of("register_comm_hook"):
        hook = call.argument("hook", 1)
        named = functions_named(module, hook.id) if isinstance(hook, ast.Name) else []
        for function in named[:1]:
            calls = list(calls_below(module, function))
            reduces = any(inner.last == "all_reduce" for inner in calls)
            averages = any("AVG" in ast.unparse(inner.node) or inner.last in _DIVIDES for inner in calls)
            text = ast.unparse(function)
            divides = any(
                isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult)
                for node in ast.walk(function)
            )
            if reduces and not averages and not divides and not WORLD.search(text) and "_hook(" not in _body(function):
                yield call, function


def _body(function: Function) -> str:
    return "".join(ast.unparse(statement) for statement in function.body)
