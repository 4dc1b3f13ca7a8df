"""Where the source lets a rank's own metric decide: loops that are left early, metrics that a callback monitors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import STATE_COLLECTIVES, is_collective
from instep.check.source.functions import (
    Function,
    Loop,
    calls_below,
    function_around,
    loops_around,
    names_in,
    trains,
)
from instep.check.source.local_metrics import local_metric
from instep.check.source.loss_inputs import loss_inputs, outlives_batches
from instep.check.source.module import SourceModule

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_stop", "stop_training", "should_save")
"""What a callback sets for the trainer of its rank."""


@dataclass(frozen=True)
class LocalDecision:
    """A condition in a training loop on a metric that may differ by rank."""

    node: ast.If | ast.While
    metric: str
    what: str
    """What is decided, in words."""


def local_decisions(module: SourceModule) -> Iterator[LocalDecision]:
    """Yield where a training loop is left, or collectives are issued, by a metric that nothing has averaged."""
    for node, what in [*_named(module), *_rates(module), *_inputs(module)]:
        metric = next((local for test in tests_of(module, node) if (local := local_metric(module, test))), "")
        if metric:
            yield LocalDecision(node, metric, what)


def _named(module: SourceModule) -> Iterator[tuple[ast.If | ast.While, str]]:
    for node, stops in decisions(module):
        yield node, "when to stop" if stops else "whether to issue collectives"


def _rates(module: SourceModule) -> Iterator[tuple[ast.If, str]]:
    """Yield the conditions in training loops under which a learning rate is set by hand."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.If) and _is_in_training(module, node):
            inner = [item for statement in node.body for item in ast.walk(statement)]
            if any(isinstance(item, ast.Assign | ast.AugAssign) and _sets_rate(item) for item in inner):
                yield node, "about its learning rate"


def _inputs(module: SourceModule) -> Iterator[tuple[ast.If, str]]:
    """Yield the conditions in training loops under which something is changed that the next losses depend on."""
    inputs = loss_inputs(module)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.If) or not _is_in_training(module, node):
            continue
        scope = function_around(module, node)
        items = [item for statement in node.body for item in ast.walk(statement)]
        for name in (name for item in items for name in _changed(item)):
            if name in inputs and outlives_batches(module, scope, name):
                yield node, f"about `{name}`, which its losses depend on"
                break


def _changed(node: ast.AST) -> list[str]:
    """Return the variable that a statement sets to a number made of itself, or to a constant."""
    if isinstance(node, ast.AugAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return []
    name = node.targets[0].id
    return [name] if isinstance(node.value, ast.Constant) or name in names_in(node.value) else []


def _sets_rate(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Subscript) and _text(target.slice) == "lr" for target in targets)


def decisions(module: SourceModule) -> Iterator[tuple[ast.If | ast.While, bool]]:
    """Yield the conditions that leave a training loop, or issue collectives in one, and whether they leave it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.While):
            stops, gathers = trains(module, node), False
        elif isinstance(node, ast.If):
            stops = _leaves_training(module, node) or _asks_to_stop(node)
            gathers = not stops and _issues_collectives(module, node) and _is_in_training(module, node)
        else:
            continue
        if stops or gathers:
            yield node, stops


def _leaves_training(module: SourceModule, node: ast.If) -> bool:
    """Return whether a branch leaves a loop that trains: `break` the innermost one, `return` all."""
    leaving = [item for item in [*node.body, *node.orelse] if isinstance(item, ast.Break | ast.Return) or _exits(item)]
    loops = list(loops_around(module, node))
    left = loops[:1] if all(isinstance(item, ast.Break) for item in leaving) else loops
    return bool(leaving) and any(trains(module, loop) for loop in left)


def _asks_to_stop(node: ast.If) -> bool:
    """Return whether a branch tells a trainer to stop or to save: `control.should_training_stop = True`."""
    return any(
        isinstance(item, ast.Assign)
        and isinstance(item.value, ast.Constant)
        and item.value.value is True
        and any(isinstance(target, ast.Attribute) and target.attr in _FLAGS for target in item.targets)
        for item in node.body
    )


def _exits(item: ast.stmt) -> bool:
    call = item.value if isinstance(item, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("sys.exit", "exit", "quit", "os._exit")


def _is_in_training(module: SourceModule, node: ast.If) -> bool:
    return any(trains(module, loop) for loop in loops_around(module, node))


def tests_of(module: SourceModule, node: ast.If | ast.While) -> Iterator[ast.expr]:
    """Yield the conditions under which a node is executed within its loop, its own first."""
    yield node.test
    for outer in module.around(node) if isinstance(node, ast.If) else ():
        if isinstance(outer, Loop | Function):
            return
        if isinstance(outer, ast.If):
            yield outer.test


def _issues_collectives(module: SourceModule, node: ast.If) -> bool:
    calls = [call for item in node.body for call in calls_below(module, item)]
    return any(is_collective(call) or call.last in STATE_COLLECTIVES for call in calls)


def monitored_logs(module: SourceModule) -> Iterator[ast.Call]:
    """Yield calls of Lightning's `self.log` without sync_dist, for metrics that something monitors."""
    monitored = {_text(item.value) for call in module.calls for item in call.node.keywords if item.arg == "monitor"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Dict):
            monitored |= {_text(v) for k, v in zip(node.keys, node.values, strict=True) if k and _text(k) == "monitor"}
    decides = any(True for _ in module.calls_of("ReduceLROnPlateau"))
    for call in module.calls_of("self.log"):
        name = call.argument("name", 0)
        if not decides or name is None or not _text(name) or _text(name) not in monitored:
            continue
        value = call.argument("value", 1)
        is_metric_object = isinstance(value, ast.Attribute)  # torchmetrics objects average themselves
        if call.argument("sync_dist") is None and not is_metric_object:
            yield call.node


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
