"""Which variables of a file hold wrapped models, and whether code runs with gradients. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.module import Call, SourceModule

DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
FSDP1 = ("torch.distributed.fsdp.FullyShardedDataParallel",)
FULLY_SHARD = ("torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard")
_NO_GRADIENTS = ("no_grad", "inference_mode")


def is_call_of(call: Call, names: tuple[str, ...]) -> bool:
    """Return whether a call is of one of these functions, also where the file imports their module under its name."""
    return call.name in names or (call.last in {name.rpartition(".")[2] for name in names} and "." not in call.name)


def assigned_from(module: SourceModule, names: tuple[str, ...]) -> dict[str, Call]:
    """Return the variables (`model`, `self.model`) that are assigned from a call of one of these functions."""
    variables: dict[str, Call] = {}
    for call in module.calls:
        parent = next(module.around(call.node), None)
        if is_call_of(call, names) and isinstance(parent, ast.Assign):
            for target in parent.targets:
                if variable := module.name_of(target):
                    variables[variable] = call
    return variables


def is_without_gradients(module: SourceModule, node: ast.AST) -> bool:
    """Return whether code lies inside `torch.no_grad()` or `inference_mode()`, or a function decorated with one."""
    return any(_ends_with(module, item, _NO_GRADIENTS) for item in _contexts(module, node))


def is_inside(module: SourceModule, node: ast.AST, names: tuple[str, ...]) -> bool:
    """Return whether code lies inside a `with` over a call of one of these functions."""
    return any(_ends_with(module, item, names) for item in _contexts(module, node))


def _contexts(module: SourceModule, node: ast.AST) -> Iterator[ast.expr]:
    for outer in module.around(node):
        if isinstance(outer, ast.With | ast.AsyncWith):
            yield from (item.context_expr for item in outer.items)
        elif isinstance(outer, ast.FunctionDef):
            yield from outer.decorator_list


def _ends_with(module: SourceModule, expression: ast.expr, names: tuple[str, ...]) -> bool:
    if isinstance(expression, ast.IfExp):  # nullcontext() if … else model.no_sync()
        return _ends_with(module, expression.body, names) or _ends_with(module, expression.orelse, names)
    if isinstance(expression, ast.Call) and _turns_off(module, expression):
        return "no_grad" in names
    called = expression.func if isinstance(expression, ast.Call) else expression
    return module.name_of(called).rpartition(".")[2] in names


def _turns_off(module: SourceModule, call: ast.Call) -> bool:
    """Return whether a call is `torch.set_grad_enabled(False)`."""
    value = call.args[0] if call.args else None
    is_switch = module.name_of(call.func).rpartition(".")[2] == "set_grad_enabled"
    return is_switch and isinstance(value, ast.Constant) and value.value is False


def scope_of(module: SourceModule, node: ast.AST) -> ast.AST:
    """Return the function that encloses a node, or the whole file."""
    functions = (outer for outer in module.around(node) if isinstance(outer, ast.FunctionDef | ast.Lambda))
    return next(functions, module.tree)


def loops_around(module: SourceModule, node: ast.AST) -> list[ast.For | ast.While]:
    """Return the loops around a node within its function, from the inside out."""
    loops: list[ast.For | ast.While] = []
    for outer in module.around(node):
        if isinstance(outer, ast.FunctionDef | ast.Lambda):
            break
        if isinstance(outer, ast.For | ast.While):
            loops.append(outer)
    return loops
