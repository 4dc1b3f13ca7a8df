"""Where a rank leaves out a backward pass, or an update, because of its own data: the others wait for its gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    Loop,
    call_sites,
    calls_below,
    calls_in,
    function_around,
    loops_around,
    names_in,
    trains,
)
from instep.check.source.local_conditions import is_local
from instep.check.source.local_metrics import local_metric
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import rank_test

_BACKWARD = ("backward", "manual_backward")
_CAUGHT = ("Exception", "BaseException", "RuntimeError", "OutOfMemoryError", "AcceleratorError", "ValueError")
_LEAVES = (ast.Continue, ast.Return)


@dataclass(frozen=True)
class Skip:
    """A place that leads a rank past a backward pass or an update, and under which condition."""

    node: ast.stmt | ast.expr
    condition: str
    updates: bool = False
    """Whether only the update is left out: the gradients were reduced, but this replica does not step."""


def skipped_backwards(module: SourceModule) -> Iterator[Skip]:
    """Yield where a rank's own data, or an error that it catches, leads it past what all ranks have to do."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.If) and _is_in_training(module, node):
            yield from _by_condition(module, node)
        elif isinstance(node, ast.Try) and _is_in_training(module, node):
            yield from _by_error(module, node)


def _by_condition(module: SourceModule, node: ast.If) -> Iterator[Skip]:
    leaving = [item for item in [*node.body, *node.orelse] if isinstance(item, _LEAVES)]
    skips = [item for item in leaving if _comes_later(module, item) and not _steps(module, node, _BACKWARD)]
    branches = [[call for item in branch for call in calls_below(module, item)] for branch in (node.body, node.orelse)]
    passes = [next((call for call in calls if call.last in _BACKWARD), None) for calls in branches]
    updates = [next((call for call in calls if _is_update(call)), None) for calls in branches]
    is_one_sided = (passes[0] is None) != (passes[1] is None)
    is_updated = not any(passes) and (updates[0] is None) != (updates[1] is None) and not leaving
    if not (skips or is_one_sided or is_updated) or rank_test(module, node.test) is not None:
        return
    if not (is_local(module, node) or _is_empty(module, node) or local_metric(module, node.test)):
        return
    if is_updated and not local_metric(module, node.test):  # a norm of reduced gradients is the same on all ranks
        return
    condition = f"if {ast.unparse(node.test)}"
    skipped = skips[0] if skips else next(call.node for call in [*passes, *updates] if call is not None)
    where = skipped if function_around(module, skipped) is function_around(module, node) else node
    yield Skip(where, condition, is_updated)


def _by_error(module: SourceModule, node: ast.Try) -> Iterator[Skip]:
    """Yield handlers that go on after an error in a forward or backward pass which only this rank may have."""
    calls = [call for item in node.body for call in calls_below(module, item)]
    has_backward = any(call.last in _BACKWARD for call in calls)
    if not has_backward and not any(_runs_model(call) for call in calls):
        return
    for handler in node.handlers:
        leaves = [inner for item in handler.body for inner in ast.walk(item)]
        is_raised = isinstance(handler.body[-1], ast.Raise)
        if not _catches(module, handler) or is_raised or any(_ends(inner) for inner in leaves):
            continue
        if any(_steps(module, item, _BACKWARD) or _agrees(module, item) for item in handler.body):
            continue
        is_left = any(isinstance(inner, _LEAVES) and _comes_later(module, inner) for inner in leaves)
        if has_backward or is_left:
            name = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
            yield Skip(handler, name)  # type: ignore[arg-type]


def _catches(module: SourceModule, handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(module.name_of(kind).rpartition(".")[2] in _CAUGHT for kind in kinds)


def _ends(node: ast.AST) -> bool:
    """Return whether a handler ends the process or the loop."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("sys.exit", "exit", "os._exit", "os.abort", "dist.abort")
    return isinstance(node, ast.Break)


def _agrees(module: SourceModule, node: ast.AST) -> bool:
    return any(is_collective(call) for call in calls_below(module, node))


def _runs_model(call: Call) -> bool:
    return "model" in call.last.lower() or call.last in ("net", "ddp", "compute_loss", "forward", "training_step")


def _comes_later(module: SourceModule, node: ast.AST) -> bool:
    """Return whether a backward pass follows a `continue` in its loop, or a `return` in its function."""
    loop = next(loops_around(module, node), None) if isinstance(node, ast.Continue) else None
    scope = loop or function_around(module, node)
    line = getattr(node, "lineno", 0)
    after = [call for call in calls_in(module, scope) if call.node.lineno > line]
    return any(inner.last in _BACKWARD for call in after for inner in calls_below(module, call.node))


def _is_in_training(module: SourceModule, node: ast.AST) -> bool:
    """Return whether a node is in a training loop, or in a function that makes a backward pass and is called in one."""
    if any(trains(module, loop) for loop in loops_around(module, node)):
        return True
    function = function_around(module, node)
    if not isinstance(function, Function) or not _steps(module, function, _BACKWARD):
        return False
    return any(next(loops_around(module, site.node), None) is not None for site in call_sites(module, function))


def _is_empty(module: SourceModule, node: ast.If) -> bool:
    """Return whether a test asks whether the batch of a training loop is there, or has any rows."""
    batch = {
        name
        for loop in loops_around(module, node)
        if isinstance(loop, ast.For) and not _is_counted(loop)
        for name in names_in(loop.target)
    } & names_in(node.test)
    if not batch:
        return False
    test = node.test.operand if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not) else node.test
    if not isinstance(test, ast.Compare):
        return test is not node.test and (isinstance(test, ast.Name) or _is_length(test))  # `if not batch:`
    side, bound = test.left, test.comparators[0]
    if isinstance(test.ops[0], ast.Is | ast.IsNot):
        return isinstance(side, ast.Name) and isinstance(bound, ast.Constant) and bound.value is None
    is_none = isinstance(bound, ast.Constant) and bound.value in (0, 1, 2) and not isinstance(bound.value, bool)
    return is_none and _is_length(side)


def _is_length(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return name in ("len", "size", "numel")
    return isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape"


def _is_counted(loop: Loop) -> bool:
    return (
        isinstance(loop, ast.For)
        and isinstance(loop.iter, ast.Call)
        and getattr(loop.iter.func, "id", "") in ("range", "trange", "count")
    )


def _steps(module: SourceModule, node: ast.AST, names: tuple[str, ...]) -> bool:
    return any(call.last in names for call in calls_below(module, node))


def _is_update(call: Call) -> bool:
    owner = call.name.rpartition(".")[0].lower()
    return call.last == "step" and ("opt" in owner or "scaler" in owner)
