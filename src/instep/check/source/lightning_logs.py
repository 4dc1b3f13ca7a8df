"""Where a LightningModule logs a metric of its own rank's batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, calls_below, calls_in, function_around
from instep.check.source.module import Call, SourceModule

_EVALUATES = frozenset(
    f"{before}{stage}{after}"
    for stage in ("validation", "test")
    for before, after in (("", "_step"), ("", "_epoch_end"), ("on_", "_epoch_end"), ("on_", "_batch_end"))
)
_COMBINES = frozenset(("all_gather", "all_reduce", "all_gather_object", "reduce", "gather", "compute"))
"""What makes a value that of all ranks; `compute` of torchmetrics does."""


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


def _is_metric_object(module: SourceModule, value: ast.expr) -> bool:
    """Return whether a value is an attribute that holds a torchmetrics object, or what one returned."""
    if isinstance(value, ast.Dict):
        return bool(value.values) and all(_is_metric_object(module, item) for item in value.values)
    held = value.func if isinstance(value, ast.Call) else value
    if not isinstance(held, ast.Attribute) or not isinstance(held.value, ast.Name) or held.value.id != "self":
        return False
    made = [source for set_names, source in assignments(module.tree) if held.attr in set_names]
    if not made:
        return isinstance(value, ast.Attribute)
    names = [call.name for source in made for call in calls_in(module, source)]
    return any("torchmetrics" in name for name in names)


def _has_one_device(module: SourceModule) -> bool:
    """Return whether the file's Trainer runs in one process."""
    trainers = list(module.calls_of("Trainer"))
    return bool(trainers) and all(
        isinstance(devices := call.argument("devices"), ast.Constant)
        and devices.value in (1, "1")
        and call.argument("num_nodes") is None
        for call in trainers
    )
