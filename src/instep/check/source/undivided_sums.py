"""Where the source sums a mean over the ranks, and reports it without dividing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import Function, assignments, call_sites, calls_in, function_around, names_in
from instep.check.source.global_counts import divides, global_counts
from instep.check.source.module import Call, SourceModule

_MEAN = re.compile(r"loss|acc(uracy)?$|acc_|mean|avg|average|metric|score|mse|mae|ppl|auc|f1", re.IGNORECASE)
_COUNT = re.compile(r"count|total|correct|num|sum|seen|hits|tokens|samples|size|weight|flag|stop", re.IGNORECASE)
_EXTREME = re.compile(r"max|min|worst|peak|slow|fast|time|duration|best|highest|lowest|stop|flag", re.IGNORECASE)
_DIVIDES = ("div", "div_", "mul_", "true_divide", "mean", "divide", "mul")
_REPORTS = (
    *(
        "print",
        "log",
        "info",
        "add_scalar",
        "log_metrics",
        "append",
        "write",
        "update",
        "set_postfix",
        "debug",
        "warning",
    ),
    *("log_dict", "echo", "set_description"),
)


@dataclass(frozen=True)
class UndividedSum:
    """A reduction whose sum is reported."""

    node: ast.Call
    name: str


def undivided_sums(module: SourceModule) -> Iterator[UndividedSum]:
    """Yield reductions of a mean by SUM whose result is reported, and nowhere divided."""
    for call in module.calls:
        if call.last not in ("reduce", "all_reduce") or not is_collective(call) or not _sums(call):
            continue
        tensor = call.argument("tensor", 0)
        if isinstance(tensor, ast.Name) and _is_reported_undivided(module, call, tensor.id):
            yield UndividedSum(call.node, tensor.id)


def extremes_as_means(module: SourceModule) -> Iterator[tuple[ast.Call, str, str]]:
    """Yield reductions of a mean by MAX, MIN or PRODUCT that is reported, with the variable and the operation."""
    for call in module.calls:
        if call.last not in ("reduce", "all_reduce") or not is_collective(call):
            continue
        op = call.argument("op", 2 if call.last == "reduce" else 1)
        kind = ast.unparse(op).rpartition(".")[2] if op is not None else ""
        tensor = call.argument("tensor", 0)
        if kind not in ("MAX", "MIN", "PRODUCT") or not isinstance(tensor, ast.Name):
            continue
        scope = function_around(module, call.node)
        words = {
            tensor.id,
            *(word for names, value in assignments(scope) if tensor.id in names for word in names_in(value)),
        }
        name = getattr(scope, "name", "")
        if _EXTREME.search(" ".join([*words, name])) or not _MEAN.search(tensor.id):
            continue
        derived = _derived(scope, {tensor.id})
        is_returned = isinstance(scope, Function) and _returns(scope, derived)
        if _reported(module, scope, derived) or (is_returned and not _EXTREME.search(name)):
            yield call.node, tensor.id, kind


def _sums(call: Call) -> bool:
    op = call.argument("op", 2 if call.last == "reduce" else 1)
    if (named := call.argument("reduce_op") or call.argument("reduction")) is not None:  # of Fabric and Accelerate
        op = named
    return op is None or ast.unparse(op).strip("'").upper().endswith("SUM")


def _is_reported_undivided(module: SourceModule, call: Call, name: str) -> bool:
    scope = function_around(module, call.node)
    sources = [value for names, value in assignments(scope) if name in names]
    words = {name, *(word for source in sources for word in names_in(source))}
    derived = _derived(scope, {name})
    if _divided(module, scope, derived) or any(_sums_rows(source) for source in sources):
        return False
    counts = global_counts(module, scope) - derived
    if any(divides(node, counts) for node in ast.walk(scope)):  # parts of a mean over all ranks
        return False
    if _is_mean(words) and _reported(module, scope, derived):
        return True
    return isinstance(scope, Function) and _returns(scope, derived) and _reported_by_callers(module, scope, words)


def _reported_by_callers(module: SourceModule, function: Function, words: set[str]) -> bool:
    """Return whether callers of a function that returns a sum report it as a mean, and do not divide it."""
    if "sum" in function.name.lower():
        return False
    sites = call_sites(module, function)
    return bool(sites) and any(_site_reports(module, site, {*words, function.name}) for site in sites)


def _site_reports(module: SourceModule, site: Call, words: set[str]) -> bool:
    scope = function_around(module, site.node)
    names = {name for set_names, value in assignments(scope) if site.node in set(ast.walk(value)) for name in set_names}
    given = {name for argument in site.node.args for name in names_in(argument)}
    around = [outer for outer in module.around(site.node) if isinstance(outer, ast.expr)]
    if any(isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div | ast.Mult) for outer in around):
        return False
    if not _is_mean(words | given | names) or any(_COUNT.search(name) for name in given):
        return False
    derived = _derived(scope, names) if names else set()
    if names and _divided(module, scope, derived):
        return False
    is_direct = any(isinstance(outer, ast.Call) and _is_report(module, outer) for outer in around)
    return is_direct or (bool(names) and _reported(module, scope, derived))


def _derived(scope: ast.AST, names: set[str]) -> set[str]:
    """Return the variables that follow from others in a scope."""
    derived = set(names)
    for _ in range(3):
        for set_names, value in assignments(scope):
            if {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} & derived:
                derived |= set_names
    return derived


def _divided(module: SourceModule, scope: ast.AST, names: set[str]) -> bool:
    for node in ast.walk(scope):
        is_division = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(
            node.op, ast.Div | ast.Mult | ast.FloorDiv
        )
        if is_division and {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} & names:
            return True
    return any(
        call.last in _DIVIDES and {inner.id for inner in ast.walk(call.node) if isinstance(inner, ast.Name)} & names
        for call in calls_in(module, scope)
    )


def _reported(module: SourceModule, scope: ast.AST, names: set[str]) -> bool:
    for call in calls_in(module, scope):
        if _is_report(module, call.node) and {n.id for n in ast.walk(call.node) if isinstance(n, ast.Name)} & names:
            return True
    return False


def _is_report(module: SourceModule, call: ast.Call) -> bool:
    return module.name_of(call.func).rpartition(".")[2] in _REPORTS


def _returns(function: Function, names: set[str]) -> bool:
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return any({n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & names for value in returned)


def _is_mean(words: set[str]) -> bool:
    return any(_MEAN.search(word) for word in words) and not any(_COUNT.search(word) for word in words)


def _sums_rows(source: ast.expr) -> bool:
    """Return whether a value is a sum over rows, for which a sum over ranks is right."""
    text = ast.unparse(source)
    return "'sum'" in text or ".sum()" in text or (text.startswith("torch.tensor([") and "," in text)
