"""Where the source averages, over ranks, a metric that only all samples together have: AUC, F1, a median."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_below,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    names_in,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import definitions

_METRICS = re.compile(
    r"^(binary_|multiclass_|multilabel_)?("
    r"roc_auc_score|roc_auc|auroc|auc|average_precision(_score)?|(f1|fbeta|precision|recall|r2|jaccard)_score|f1|r2"
    r"|precision_recall_fscore_support|balanced_accuracy_score|matthews_corrcoef|cohen_kappa(_score)?|median"
    r"|median_absolute_error|root_mean_squared_error|perplexity|pearsonr|spearmanr|kendalltau|corrcoef"
    r"|pearson_corrcoef|spearman_corrcoef|explained_variance(_score)?|v_measure_score|calibration_error)$"
)
"""Functions whose value of all samples is not the mean of their values of parts."""
_OWN = re.compile(
    r"(^|_)(auc|auroc|roc|f1|f_?beta|median|perplexity|ppl|precision|recall|pearson|spearman|kendall|kappa|ndcg|mrr"
    r"|r2|correlation|average_precision|mean_average_precision|map|bleu|rouge|iou|miou|ece)(_|$)",
    re.IGNORECASE,
)
"""The same, written by the user."""
_TIME = re.compile(r"time|duration|latency|elapsed|seconds", re.IGNORECASE)
"""Medians of times are no metrics of the samples."""
_PERPLEXITY = re.compile(r"ppl|perplex", re.IGNORECASE)
_OWNERS = ("sklearn", "torchmetrics", "torcheval", "scipy", "numpy", "torch", "statistics", "evaluate")
_GATHERS = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
        *("gather_for_metrics", "all_gather_list", "nested_gather"),
    )
)
_REDUCES = frozenset(("all_reduce", "reduce"))
_MEANS = frozenset(("mean", "fmean", "average", "nanmean"))


@dataclass(frozen=True)
class AveragedMetric:
    """A collective that brings together the ranks' values of a metric, and where the metric is computed."""

    node: ast.Call
    metric: Call


def averaged_metrics(module: SourceModule) -> Iterator[AveragedMetric]:
    """Yield the metrics of this rank's samples that become a mean over ranks."""
    is_named = any(isinstance(key, ast.Constant) and _OWN.search(str(key.value)) for key in _keys(module))
    if not is_named and not any(is_metric_of_all(module, call) or call.last == "exp" for call in module.calls):
        return
    for call in module.calls:
        if _becomes_mean(module, call):
            values = [value for value in _values(call) if value is not None]
            metric = next(
                (computed for value in values if (computed := _metric_of(module, value, call.node)) is not None), None
            )
            if metric is not None:
                yield AveragedMetric(_given_at(module, call, metric), metric)


def _keys(module: SourceModule) -> Iterator[ast.expr | None]:
    return (key for node in ast.walk(module.tree) if isinstance(node, ast.Dict) for key in node.keys)


def _given_at(module: SourceModule, call: Call, metric: Call) -> ast.Call:
    """Return the collective; in a helper that averages other values, too, the call that gives it the metric."""
    helper = function_around(module, call.node)
    sites = call_sites(module, helper) if isinstance(helper, Function) else []
    scope = function_around(module, metric.node)
    given = [site.node for site in sites if function_around(module, site.node) is scope]
    return given[0] if len(sites) > 1 and scope is not helper and len(given) == 1 else call.node


def named_means(module: SourceModule) -> Iterator[tuple[Call, str]]:
    """Yield what Lightning logs as a mean over ranks although its name says that it is no mean, with the name."""
    for call in module.calls_of("self.log"):
        name, sync, value = call.argument("name", 0), call.argument("sync_dist"), call.argument("value", 1)
        is_mean = isinstance(sync, ast.Constant) and sync.value is True and call.argument("reduce_fx") is None
        if not is_mean or not isinstance(name, ast.Constant) or not _OWN.search(str(name.value)):
            continue
        scope = function_around(module, call.node)
        calls = {inner.last for inner in calls_below(module, scope)}
        is_object = isinstance(value, ast.Attribute)  # torchmetrics objects know how to combine their parts
        if not is_object and not calls & (_GATHERS | _REDUCES | {"compute"}):
            yield call, str(name.value)


def _values(call: Call) -> list[ast.expr | None]:
    """Return what a collective takes: for all_gather, the second argument."""
    return [*call.node.args, call.argument("tensor"), call.argument("obj")]


def _becomes_mean(module: SourceModule, call: Call) -> bool:
    """Return whether the result of a collective is averaged over ranks."""
    scope, text = function_around(module, call.node), ast.unparse(call.node)
    if call.last == "log" and call.name == "self.log":  # Lightning averages
        sync = call.argument("sync_dist")
        return isinstance(sync, ast.Constant) and sync.value is True
    if call.last in _REDUCES and ("AVG" in text or "'mean'" in text):
        return True
    if call.last in _REDUCES:
        return any(
            _divides_by_ranks(node) for node in ast.walk(scope) if getattr(node, "lineno", 0) >= call.node.lineno
        )
    if call.last not in _GATHERS:
        return False
    later = [other for other in calls_in(module, scope) if other.node.lineno >= call.node.lineno]
    return any(other.last in _MEANS or (other.last == "sum" and _is_divided(module, other)) for other in later)


def _divides_by_ranks(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div):
        return False
    divisor = ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value)
    return "world" in divisor or "num_processes" in divisor or divisor in ("n_ranks", "num_ranks", "nprocs", "ws")


def _is_divided(module: SourceModule, call: Call) -> bool:
    return any(isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div) for outer in module.around(call.node))


def _metric_of(module: SourceModule, value: ast.expr, use: ast.AST, depth: int = 5) -> Call | None:
    """Return the call of a metric, on this rank's samples, that a value comes from; None: it comes from none."""
    if not depth:
        return None
    for call in calls_in(module, value):
        if is_metric_of_all(module, call):
            return call if not _is_gathered(module, call) else None
        if call.last in _GATHERS:
            return None
        if (method := _method(module, call)) is not None and _returns_metric(module, method):
            return call if not _is_gathered(module, call) else None
        for function in functions_named(module, call.last) if "." not in call.name or "self." in call.name else ():
            returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
            metrics = (_metric_of(module, part, part, depth - 1) for part in returned if part is not None)
            if (metric := next((one for one in metrics if one is not None), None)) is not None:
                return metric
    return _metric_of_names(module, value, use, depth)


def _metric_of_names(module: SourceModule, value: ast.expr, use: ast.AST, depth: int) -> Call | None:
    """Return the metric that the variables of a value were set from, here or by the callers of this function."""
    scope, names = function_around(module, use), names_in(value)
    for set_names, source in assignments(scope):
        if not set_names & names or source is value or source.lineno > value.lineno:
            continue
        if perplexity := _perplexity(module, set_names & names, source):
            return perplexity if not _is_gathered(module, perplexity) else None
        if (metric := _metric_of(module, source, source, depth - 1)) is not None:
            return metric
    if isinstance(scope, Function):
        for number, parameter in enumerate(item.arg for item in scope.args.args):
            for site in call_sites(module, scope) if parameter in names else ():
                given = site.argument(parameter, number)
                if given is not None and (metric := _metric_of(module, given, site.node, depth - 1)) is not None:
                    return metric
    return None


def _perplexity(module: SourceModule, names: set[str], source: ast.expr) -> Call | None:
    if not any(_PERPLEXITY.search(name) for name in names):
        return None
    return next((call for call in calls_in(module, source) if call.last == "exp"), None)


def is_whole(call: Call) -> bool:
    """Return whether a call is one of a metric that is not a mean over samples."""
    if not _METRICS.match(call.last) or (call.last == "median" and _TIME.search(ast.unparse(call.node))):
        return False
    owner, _, _ = call.name.partition(".")
    return (
        owner in _OWNERS or call.name.startswith(("metrics.", "np.")) or (call.last == "median" and not call.node.args)
    )


def is_metric_of_all(module: SourceModule, call: Call) -> bool:
    """Return whether a call is one of such a metric: of a library, or of a function of this file that computes one."""
    if is_whole(call):
        return True
    own = [] if is_imported(module, call) or not _OWN.search(call.last) else functions_named(module, call.last)
    brings_together = _GATHERS | _REDUCES
    return bool(own) and not any(
        inner.last in brings_together or _trains_or_evaluates(inner)
        for one in own
        for inner in calls_below(module, one)
    )


def _method(module: SourceModule, call: Call) -> Function | None:
    """Return the method of a class of this file that a call of a variable's executes: `matrix.compute()`."""
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    made = definitions(module.tree, owner.id) if isinstance(owner, ast.Name) else []
    classes = {module.call_of[one.value].last for one in made if isinstance(one.value, ast.Call)}
    return next(
        (
            function
            for function in functions_named(module, call.last)
            if any(isinstance(outer, ast.ClassDef) and outer.name in classes for outer in module.around(function))
        ),
        None,
    )


def _returns_metric(module: SourceModule, function: Function) -> bool:
    """Return whether a function returns a dict with such a metric, by its key, and brings nothing together."""
    if any(call.last in _GATHERS | _REDUCES or _trains_or_evaluates(call) for call in calls_below(module, function)):
        return False
    dicts = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    keys = [key for one in dicts if isinstance(one, ast.Dict) for key in one.keys]
    return any(isinstance(key, ast.Constant) and _OWN.search(str(key.value)) for key in keys)


def _trains_or_evaluates(call: Call) -> bool:
    """Return whether a function also trains or evaluates: it is no metric, whatever its name says."""
    return call.last in ("backward", "eval", "no_grad", "state_dict")


def _is_gathered(module: SourceModule, metric: Call) -> bool:
    """Return whether samples or sums of all ranks are brought together before a metric is computed."""
    scope = function_around(module, metric.node)
    around = set(module.around(metric.node))  # what is given the metric comes after it
    before = [
        call for call in calls_in(module, scope) if call.node.lineno <= metric.node.lineno and call.node not in around
    ]
    if inputs := _inputs(module, scope, metric):
        before = [call for call in before if _held_by(module, call) & inputs]
    return any(
        inner.last in _GATHERS | _REDUCES
        for call in before
        if call is not metric
        for inner in calls_below(module, call.node)
    )


def _inputs(module: SourceModule, scope: ast.AST, metric: Call) -> set[str]:
    """Return the variables that a metric is computed from, and those that they were set from, or filled with."""
    names = {node.id for node in ast.walk(metric.node) if isinstance(node, ast.Name)} - module.aliases.keys()
    for _ in range(4):
        for targets, value in assignments(scope):
            if targets & names:
                names |= names_in(value)
        for call in calls_in(module, scope):
            if call.last in ("append", "extend") and call.name.rpartition(".")[0] in names:
                names |= {name for argument in call.node.args for name in names_in(argument)}
    return names - module.functions.keys()


def _held_by(module: SourceModule, call: Call) -> set[str]:
    """Return the variables that a call is given, that it belongs to, and that are set to its result."""
    statement = next(module.statements_around(call.node), None)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {name for node in [call.node, *targets] for name in names_in(node)}
