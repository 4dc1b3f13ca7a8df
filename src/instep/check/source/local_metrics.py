"""Whether a value is a metric of this rank's data: followed back through assignments, functions and attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    loops_around,
    names_in,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import mentions_rank
from instep.check.source.reaching import Definition, definitions, reaching, syncs

_MEASURED = re.compile(r"loss|acc(uracy)?$|metric|score|f1|auc|ppl|perplexity|rmse|mse|mae|error", re.I)
_EVALUATES = re.compile(r"eval|valid|^test|_test|score|measure", re.I)
_SETTINGS = frozenset(("args", "cfg", "config", "self", "hparams", "opts", "opt", "conf", "settings", "params"))
_LIBRARIES = ("torch", "numpy", "math", "sklearn", "statistics", "np", "builtins")
DEPTH = 8


def local_metric(module: SourceModule, test: ast.expr) -> str:
    """Return the metric of this rank's data that an expression depends on; empty: it depends on none."""
    return next(Walk(module).leaves(test, "", DEPTH), "")


class Walk:
    """One walk back from an expression; each expression is visited once for each metric that leads to it."""

    def __init__(self, module: SourceModule) -> None:
        self.module = module
        self._seen: set[tuple[ast.AST, str, int | None]] = set()

    def leaves(self, value: ast.expr, metric: str, depth: int, index: int | None = None) -> Iterator[str]:
        """Yield the metrics that lead to data of this rank, on ways where nothing brings the ranks together."""
        if not depth or (value, metric, index) in self._seen:
            return
        self._seen.add((value, metric, index))
        if index is not None and isinstance(value, ast.Tuple) and index < len(value.elts):
            value = value.elts[index]
        if any(_is_the_same(self.module, call) for call in calls_in(self.module, value)):
            return
        own = [call for call in calls_in(self.module, value) if _functions(self.module, call)]
        given = {inner for call in own for inner in ast.walk(call.node)}  # it counts if the function returns it
        yield from self.origins([node for node in ast.walk(value) if node not in given])
        for call in own:
            for function in _functions(self.module, call):
                yield from self._returned(function, metric, depth, index if call.node is value else None)
        for name, node in _uses(self.module, value, {call.node for call in own}):
            yield from self._of_name(name, node, metric, depth)

    def origins(self, nodes: list[ast.AST]) -> Iterator[str]:  # noqa: ARG002
        """Yield what makes an expression, given by its nodes, differ by rank, whatever it is called."""
        return iter(())

    def measured(self, name: str, value: ast.expr | None) -> str:
        """Return a variable's name if it is that of a metric, or is set to one."""
        is_metric = _MEASURED.search(name) or (value is not None and _evaluates(self.module, value))
        return name if is_metric else ""

    def _returned(self, function: Function, metric: str, depth: int, index: int | None) -> Iterator[str]:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from self.leaves(node.value, metric, depth - 1, index)
                if isinstance(node.value, ast.Constant):
                    yield from self._conditions(node, depth)

    def _of_name(self, name: str, node: ast.expr, metric: str, depth: int) -> Iterator[str]:
        defined = reaching(self.module, name, node)
        if defined is None:
            return
        if isinstance(node, ast.Attribute) and not defined:
            defined = definitions(self.module.tree, name)
        if metric and defined and self._is_of_batch(name, node, defined):
            yield metric
            return
        if defined:
            for one in defined:
                yield from self._of_definition(name, one, metric, depth)
            return
        scope = function_around(self.module, node)
        if isinstance(scope, Function) and name in {item.arg for item in scope.args.args}:
            yield from self._given(scope, name, metric, depth)
        elif (
            isinstance(node, ast.Name) and (outside := self.module.assigned.get(name)) and scope is not self.module.tree
        ):
            for value in outside:
                yield from self.leaves(value, metric, depth - 1)
        elif metric and isinstance(node, ast.Name) and name not in _SETTINGS:
            yield metric

    def _is_of_batch(self, name: str, node: ast.expr, defined: list[Definition]) -> bool:
        """Return whether a variable is a loop's own, which is only moved or changed: `x = x.to(device)`."""
        loops = (loop for loop in loops_around(self.module, node) if isinstance(loop, ast.For))
        is_of_loop = any(name in names_in(loop.target) for loop in loops)
        return is_of_loop and all(name in names_in(one.value) for one in defined)

    def _of_definition(self, name: str, one: Definition, metric: str, depth: int) -> Iterator[str]:
        yield from self.leaves(one.value, self.measured(name, one.value) or metric, depth - 1, one.index)
        if isinstance(one.value, ast.Constant):  # a counter or flag: its condition decides
            yield from self._conditions(one.statement, depth)

    def _given(self, function: Function, name: str, metric: str, depth: int) -> Iterator[str]:
        """Yield what callers give for a parameter."""
        parameters = [item.arg for item in function.args.args if item.arg != "self"]
        own = self.measured(name, None)
        for site in _sites(self.module, function):
            given = site.argument(name, parameters.index(name)) if name in parameters else None
            if given is not None:
                yield from self.leaves(given, metric or own, depth - 1)

    def _conditions(self, node: ast.AST, depth: int) -> Iterator[str]:
        for outer in self.module.around(node):
            if isinstance(outer, Function):
                return
            if isinstance(outer, ast.If):
                yield from self.leaves(outer.test, "", depth - 1)


def _uses(module: SourceModule, value: ast.expr, own: set[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables and attributes that a value is computed from."""
    if isinstance(value, ast.Name):
        if value.id not in module.aliases and value.id not in module.functions:
            yield value.id, value
    elif isinstance(value, ast.Attribute):
        yield value.attr, value
        if not (isinstance(value.value, ast.Name) and value.value.id in (_SETTINGS | module.aliases.keys())):
            yield from _uses(module, value.value, own)
    elif isinstance(value, ast.Call):
        yield from _uses_of_call(module, value, own)
    else:
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                yield from _uses(module, child, own)


def _uses_of_call(module: SourceModule, call: ast.Call, own: set[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
    if call in own or (isinstance(call.func, ast.Name) and call.func.id in ("len", "range")):
        return
    if isinstance(call.func, ast.Attribute):
        yield from _uses(module, call.func.value, own)
    for argument in [*call.args, *(item.value for item in call.keywords)]:
        yield from _uses(module, argument, own)


def _functions(module: SourceModule, call: Call) -> list[Function]:
    """Return the functions of this file that a call may execute; `stopper(x)` executes `__call__` of its class."""
    if is_imported(module, call):
        return []
    named = functions_named(module, call.last)
    if named or not isinstance(call.node.func, ast.Name | ast.Attribute):
        return named
    made = {name for set_names, value in assignments(module.tree) if call.last in set_names for name in names_in(value)}
    return [one for one in functions_named(module, "__call__") if _class(module, one) in made]


def _sites(module: SourceModule, function: Function) -> list[Call]:
    if function.name != "__call__":
        return call_sites(module, function)
    return [call for call in module.calls if function in _functions(module, call)]


def _class(module: SourceModule, function: Function) -> str:
    return next((outer.name for outer in module.around(function) if isinstance(outer, ast.ClassDef)), "")


def _evaluates(module: SourceModule, value: ast.expr) -> bool:
    """Return whether a value is what an evaluation returns."""
    return any(_EVALUATES.search(call.last) and _functions(module, call) for call in calls_in(module, value))


def _is_the_same(module: SourceModule, call: Call) -> bool:
    """Return whether a call gives the same on all ranks, or is of another file's function that may."""
    if syncs(call) or call.last == "compute":  # of torchmetrics
        return True
    if is_imported(module, call) and not call.name.startswith(_LIBRARIES):
        names = {name.lower() for argument in call.node.args for name in names_in(argument)}
        return any(word in name for name in names for word in ("model", "loader", "net", "data"))
    return bool(_functions(module, call)) and has_all_data(module, call)


def has_all_data(module: SourceModule, call: Call) -> bool:
    """Return whether a function is given loaders that no sampler, framework or rank divides: every rank has all."""
    given = [*call.node.args, *(item.value for item in call.node.keywords)]
    names = {name for argument in given for name in names_in(argument)}
    made = [value for set_names, value in assignments(module.tree) if set_names & names]
    loaders = [value for value in made if isinstance(value, ast.Call) and _last(value.func).endswith("DataLoader")]
    prepared = any(
        _last(value.func) in ("prepare", "setup_dataloaders") for value in made if isinstance(value, ast.Call)
    )
    return bool(loaders) and not prepared and not any(_is_sharded(module, loader) for loader in loaders)


def _is_sharded(module: SourceModule, loader: ast.Call) -> bool:
    if any(item.arg in ("sampler", "batch_sampler", None) for item in loader.keywords):
        return True
    names = {name for argument in loader.args[:1] for name in names_in(argument)}
    sources = [value for set_names, value in assignments(module.tree) if set_names & names]
    return any(mentions_rank(value) for value in [*loader.args[:1], *sources])


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
