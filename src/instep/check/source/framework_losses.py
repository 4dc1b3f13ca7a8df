"""Where the source divides a loss by the number of micro-batches, and Accelerate or Lightning divides it, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from instep.check.source.functions import assignments, function_around, functions_named, names_in
from instep.check.source.module import Call, SourceModule

_ACCUMULATES = re.compile(r"accum", re.IGNORECASE)


def divided_for_frameworks(module: SourceModule) -> Iterator[tuple[Call, ast.BinOp | ast.AugAssign]]:
    """Yield the call after which a framework divides a loss that the source has divided, with the division."""
    settings = [
        (call, value)
        for call in module.calls
        for key in ("gradient_accumulation_steps", "accumulate_grad_batches")
        if (value := call.argument(key)) is not None
        and call.last in ("Accelerator", "Trainer", "GradientAccumulationPlugin")
        and not (isinstance(value, ast.Constant) and value.value == 1)
        and not call.name.startswith("transformers")
    ]
    if not settings:
        return
    numbers = {ast.unparse(value) for _, value in settings if not isinstance(value, ast.Constant)}
    for call in module.calls_of("accelerator.backward"):
        names = {name for argument in call.node.args for name in names_in(argument)}
        scope = function_around(module, call.node)
        values = [*call.node.args, *(value for targets, value in assignments(scope) if targets & names)]
        augmented = [
            node for node in ast.walk(scope) if isinstance(node, ast.AugAssign) and names_in(node.target) & names
        ]
        if (division := _division([*values, *augmented], numbers)) is not None:
            yield call, division
    for call, _ in settings:
        for step in functions_named(module, "training_step") if call.last == "Trainer" else ():
            if not any(inner.last == "manual_backward" for inner in module.calls):
                nodes = [node for node in ast.walk(step) if isinstance(node, ast.BinOp | ast.AugAssign)]
                if (division := _division(nodes, numbers)) is not None:
                    yield call, division
                    return


def _division(values: Sequence[ast.AST], numbers: set[str]) -> ast.BinOp | ast.AugAssign | None:
    """Return a division by the number of micro-batches."""
    for value in values:
        for node in ast.walk(value):
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
                divisor = ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value)
                if divisor in numbers or _ACCUMULATES.search(divisor):
                    return node
    return None
