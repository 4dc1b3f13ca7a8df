"""Where a LightningModule logs a metric of its own rank's batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import Function, assignments, call_sites, calls_below, calls_in, function_around
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import definitions

_EVALUATES = frozenset(
    f"{before}{stage}{after}"
    for stage in ("validation", "test")
    for before, after in (("", "_step"), ("", "_epoch_end"), ("on_", "_epoch_end"), ("on_", "_batch_end"))
)
_COMBINES = frozenset(("all_gather", "all_reduce", "all_gather_object", "reduce", "gather", "compute"))
"""What makes a value that of all ranks; `compute` of torchmetrics does."""
_DEPTH = 4


def local_logs(module: SourceModule) -> Iterator[Call]:
    """Yield the calls of `self.log` in an evaluation that report this rank's value."""
    names = " ".join(module.aliases.values())
    if "lightning" not in names or _has_one_device(module):
        return
    for call in module.calls_of("self.log", "self.log_dict"):
        if call.name not in ("self.log", "self.log_dict"):
            continue
        function = function_around(module, call.node)
        is_evaluation = getattr(function, "name", "") in _EVALUATES or _is_called_by_one(module, function)
        if is_evaluation and not _is_synced(call) and not _is_of_all_ranks(module, call, function):
            yield call


def _is_called_by_one(module: SourceModule, function: ast.AST) -> bool:
    """Return whether an evaluation calls a function, and no training step does."""
    callers = {
        name
        for name, functions in module.functions.items()
        for other in functions
        if any(
            call.last == getattr(function, "name", "") and call.name.startswith("self.")
            for call in calls_in(module, other)
        )
    }
    return bool(callers) and callers <= _EVALUATES


def _is_synced(call: Call) -> bool:
    """Return whether a log is averaged over ranks, or its options are not known."""
    if any(keyword.arg is None for keyword in call.node.keywords) or call.argument("rank_zero_only") is not None:
        return True
    sync = call.argument("sync_dist")
    return sync is not None and not (isinstance(sync, ast.Constant) and sync.value is False)


def _is_of_all_ranks(module: SourceModule, call: Call, function: ast.AST) -> bool:
    """Return whether the value is a torchmetrics object, or was brought together before."""
    value = call.argument("value" if call.last == "log" else "dictionary", 1 if call.last == "log" else 0)
    if value is None or _is_metric_object(module, value):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    sources = [value, *(source for set_names, source in assignments(function) if set_names & names)]
    if any(_is_metric_object(module, source) for source in sources):
        return True
    reduced = [inner for inner in calls_in(module, function) if inner.last in _COMBINES and inner.node is not call.node]
    return bool(reduced) or any(inner.last in _COMBINES for source in sources for inner in calls_below(module, source))


def _is_metric_object(module: SourceModule, value: ast.expr, depth: int = _DEPTH) -> bool:
    """Return whether a value is a torchmetrics object, or what one returned: an attribute, variable or parameter."""
    if isinstance(value, ast.Dict):
        return bool(value.values) and all(_is_metric_object(module, item, depth) for item in value.values)
    held = value.func if isinstance(value, ast.Call) else value
    if isinstance(held, ast.Name) and isinstance(value, ast.Name):
        return depth > 0 and _holds_metric_object(module, held, depth)
    if not isinstance(held, ast.Attribute) or not isinstance(held.value, ast.Name) or held.value.id != "self":
        return False
    made = definitions(module.tree, held.attr)
    if not made:
        return isinstance(value, ast.Attribute)
    return any(_makes_metric_object(module, one.value, depth) for one in made)


def _makes_metric_object(module: SourceModule, source: ast.expr, depth: int) -> bool:
    """Return whether an expression makes a torchmetrics object, or copies one: `scores.clone(prefix="val_")`."""
    calls = list(calls_in(module, source))
    if any("torchmetrics" in call.name for call in calls):
        return True
    copied = [call.node.func for call in calls if call.last == "clone"]
    owners = [function.value for function in copied if isinstance(function, ast.Attribute)]
    return depth > 0 and any(_is_metric_object(module, owner, depth - 1) for owner in owners)


def _holds_metric_object(module: SourceModule, name: ast.Name, depth: int) -> bool:
    """Return whether a variable is set to such an object, or every caller of its function gives one for it."""
    scope = function_around(module, name)
    made = [one for one in definitions(scope, name.id) if one.statement.lineno <= name.lineno]
    if made:
        return any(_makes_metric_object(module, one.value, depth - 1) for one in made)
    parameters = [item.arg for item in scope.args.args if item.arg != "self"] if isinstance(scope, Function) else []
    if name.id not in parameters or not isinstance(scope, Function):
        return False
    given = [call.argument(name.id, parameters.index(name.id)) for call in call_sites(module, scope)]
    return bool(given) and all(one is not None and _is_metric_object(module, one, depth - 1) for one in given)


def _has_one_device(module: SourceModule) -> bool:
    """Return whether the file's Trainer runs in one process."""
    trainers = list(module.calls_of("Trainer"))
    return bool(trainers) and all(
        isinstance(devices := call.argument("devices"), ast.Constant)
        and devices.value in (1, "1")
        and call.argument("num_nodes") is None
        for call in trainers
    )
