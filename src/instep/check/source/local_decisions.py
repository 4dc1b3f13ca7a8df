"""Where the source lets a rank's own metric decide: loops that are left early, metrics that a callback monitors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import STATE_COLLECTIVES, agrees, is_collective
from instep.check.source.functions import (
    assignments,
    calls_below,
    calls_in,
    function_around,
    functions_named,
    loops_around,
    names_in,
    trains,
)
from instep.check.source.module import SourceModule

_METRIC = re.compile(
    r"loss|acc(uracy)?$|metric|score|f1|auc|ppl|perplexity|patience|bad_epochs|wait|improve|best|early|stop", re.I
)
_MEASURED = re.compile(r"loss|acc(uracy)?$|metric|score|f1|auc|ppl|perplexity|rmse|mse|mae|error", re.I)
_SYNCED = (
    "gather_for_metrics",
    "all_reduce",
    "sync",
    "average_over_ranks",
    "reduce_mean",
    "reduce_dict",
    "reduce_tensor",
)
"""Parts of names of functions that average over the ranks."""


@dataclass(frozen=True)
class LocalDecision:
    """A condition in a training loop on a metric that may differ by rank."""

    node: ast.If
    metric: str
    stops: bool
    """Whether the loop is left; otherwise, collectives follow."""


def local_decisions(module: SourceModule) -> Iterator[LocalDecision]:
    """Yield where a training loop is left, or collectives are issued, by a metric that nothing has averaged."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.If) or not any(_METRIC.search(name) for name in names_in(node.test)):
            continue
        stops = any(isinstance(item, ast.Break | ast.Return) for item in node.body)
        gathers = not stops and _issues_collectives(module, node)
        if not (stops or gathers) or not any(trains(module, loop) for loop in loops_around(module, node)):
            continue
        metric = _local_metric(module, node.test)
        if metric:
            yield LocalDecision(node, metric, stops)


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


def _local_metric(module: SourceModule, test: ast.expr) -> str:
    """Return the metric that a test depends on; empty: it depends on none, or on one that is the same on all ranks."""
    scope = function_around(module, test)
    wanted, values = names_in(test), [test]
    for _ in range(4):
        for names, value in [*assignments(scope), *_conditional_counts(scope)]:
            if names & wanted and value not in values:
                values.append(value)
                wanted |= names_in(value)
    if any(_synced(module, value) for value in values) or _reduced_in_place(module, scope, wanted):
        return ""
    if any(_same_everywhere(module, value) for value in values):
        return ""
    return next((name for name in sorted(wanted) if _MEASURED.search(name)), "")


def _conditional_counts(scope: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield what is set under an `if`, with the test: `if loss < best: bad = 0` makes `bad` depend on the loss."""
    for node in ast.walk(scope):
        if isinstance(node, ast.If):
            for statement in [*node.body, *node.orelse]:
                for names, _ in assignments(statement):
                    yield names, node.test


def _synced(module: SourceModule, value: ast.expr) -> bool:
    return any(agrees(call) or any(word in call.last for word in _SYNCED) for call in calls_below(module, value))


def _reduced_in_place(module: SourceModule, scope: ast.AST, names: set[str]) -> bool:
    return any(
        agrees(call) and any(names_in(argument) & names for argument in call.node.args)
        for call in calls_in(module, scope)
    )


def _same_everywhere(module: SourceModule, value: ast.expr) -> bool:
    """Return whether a metric comes from a function of this file over loaders without a sampler: every rank has all."""
    if not isinstance(value, ast.Call) or not functions_named(module, _last(value.func)):
        return False
    names = {name for argument in value.args for name in names_in(argument)}
    loaders = [v for set_names, v in assignments(module.tree) if set_names & names and _is_loader(v)]
    return bool(loaders) and not any(_is_sharded(loader) for loader in loaders)


def _is_loader(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _last(value.func).endswith("DataLoader")


def _is_sharded(value: ast.expr) -> bool:
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return any(item.arg in ("sampler", "batch_sampler", None) for item in keywords)


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
