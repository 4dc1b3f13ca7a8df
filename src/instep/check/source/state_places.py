"""Where the source sets what a path of variables and attributes names, and where one rank alone changes a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from instep.check.source.functions import (
    Function,
    call_sites,
    calls_in,
    function_around,
    loops_around,
    names_in,
)
from instep.check.source.module import SourceModule
from instep.check.source.rank_guards import guard_of_callers, rank_guard
from instep.check.source.reaching import Definition, definitions

REPORTS = frozenset(
    (
        *("print", "info", "log", "log_metrics", "add_scalar", "add_scalars", "write", "report", "echo", "log_dict"),
        *("debug", "warning", "set_postfix", "writerow", "dump", "format", "append"),
    )
)
"""Functions that report a value."""
_DRAWS = re.compile(r"rand|beta\(|uniform|normal\(|choice|\.sample|bernoulli|multinomial|dirichlet")
_LOADS = ("load_state_dict", "load_checkpoint", "load_weights", "load_model", "set_model_state_dict")
_CHANGES = ("reset_parameters", "init_weights", "copy_", "normal_", "zero_", "mul_", "lerp_", "prune", "apply")
_ACTIONS = ("action", "actions", "act", "acts", "control", "controls")


def place_of(modules: Sequence[SourceModule], file: str, names: Sequence[str]) -> tuple[str, int] | None:
    """Return the line that sets the last name of a path: the attribute, or the variable that holds what has it."""
    for name in reversed(names):
        defined = [
            (module, one)
            for module in sorted(modules, key=lambda module: module.path != file)
            for one in _settings(module, name)
        ]
        if defined:
            module, one = defined[0]
            return module.path, one.statement.lineno
    return None


def updates_of(modules: Sequence[SourceModule], names: Sequence[str]) -> tuple[str, int] | None:
    """Return the line that changes what a path names later on: an element, in place, or outside of `__init__`.

    What is done in a loop comes first: a variable's first value is none of its changes.
    """
    for module in modules:
        changes = [
            node
            for node in ast.walk(module.tree)
            if _changes(node, names[-1], is_attribute=len(names) > 1)
            and getattr(function_around(module, node), "name", "") != "__init__"
        ]
        in_loops = [node for node in changes if any(True for _ in loops_around(module, node))]
        if changes:
            return module.path, (in_loops or changes)[0].lineno  # type: ignore[attr-defined]
    return None


def updating_call(modules: Sequence[SourceModule], names: Sequence[str]) -> tuple[str, int] | None:
    """Return the line in a loop that tells an object to change its attribute: `scaler.update(x)` for `scaler.mean`."""
    if len(names) < 2 or names[-2] == "self":
        return None
    for module in modules:
        methods = {
            getattr(function_around(module, node), "name", "")
            for node in ast.walk(module.tree)
            if _changes(node, names[-1], is_attribute=True)
        } - {"__init__"}
        for call in module.calls:
            owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
            is_owner = owner is not None and _last(owner) == names[-2]
            if is_owner and call.last in methods and any(True for _ in loops_around(module, call.node)):
                return module.place(call.node)
    return None


def is_carried(modules: Sequence[SourceModule], name: str) -> bool:
    """Return whether an attribute's next value follows from its last one: in place, or by an assignment that has it."""
    return any(
        _changes(node, name)
        and not (isinstance(node, ast.Assign) and _is_set_anew(node, name))
        and getattr(function_around(module, node), "name", "") != "__init__"
        for module in modules
        for node in ast.walk(module.tree)
    )


def is_drawn(modules: Sequence[SourceModule], name: str) -> bool:
    """Return whether an attribute is set to random numbers, which each rank draws for itself."""
    return any(
        _changes(node, name) and bool(_DRAWS.search(ast.unparse(node.value)))
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign | ast.AugAssign)
    )


def _is_set_anew(node: ast.Assign, name: str) -> bool:
    is_whole = all(isinstance(target, ast.Name | ast.Attribute | ast.Tuple) for target in node.targets)
    return is_whole and name not in names_in(node.value)


def is_computed_with(modules: Sequence[SourceModule], name: str) -> bool:
    """Return whether an attribute is part of a computation with other variables: not only of its update or a report."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.ctx, ast.Load):
                continue
            statement = next(module.statements_around(node), None)
            is_reported = any(
                isinstance(outer, ast.JoinedStr)
                or (isinstance(outer, ast.Call) and module.call_of[outer].last in REPORTS)
                for outer in module.around(node)
            )
            if statement is None or isinstance(statement, ast.If | ast.While) or is_reported or _sets(statement, name):
                continue
            if _other_names(module, node, statement) - {"self", "torch", "math", "max", "min", "float"}:
                return True
    return False


def _sets(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(target is not None and _last(target) == name for target in targets)


def _other_names(module: SourceModule, node: ast.Attribute, statement: ast.stmt) -> set[str]:
    """Return the variables that the operations around an attribute have besides."""
    names: set[str] = set()
    for outer in module.around(node):
        if outer is statement:
            break
        if isinstance(outer, ast.BinOp | ast.Subscript | ast.Call):
            names |= {inner.id for inner in ast.walk(outer) if isinstance(inner, ast.Name)}
    own = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names - own


def guarded_use(modules: Sequence[SourceModule], name: str) -> tuple[str, int] | None:
    """Return the line that only some ranks execute, in a loop, and that updates what a variable holds."""
    for module in modules:
        for call in module.calls:
            is_update = call.last.endswith("_") or "update" in call.last or call.last == "step"
            around = list(module.statements_around(call.node))[:2]
            mentioned = any(name in names_in(outer) for outer in around if not isinstance(outer, ast.If | Function))
            if is_update and mentioned and guard_of_callers(module, call.node) is not None:
                return module.place(call.node)
    return None


def changes_by_one_rank(modules: Sequence[SourceModule]) -> Iterator[tuple[str, int]]:
    """Yield the lines at which code that only some ranks execute changes weights, itself or in a function it calls."""
    for module in modules:
        changing = [node for node in ast.walk(module.tree) if _changes_weights(module, node)]
        functions = {function_around(module, node) for node in changing}
        sites = [
            site.node
            for function in functions
            if isinstance(function, Function)
            for site in call_sites(module, function)
        ]
        for node in [*changing, *sites]:
            if rank_guard(module, node) is not None:
                yield module.path, node.lineno  # type: ignore[attr-defined]


def _changes_weights(module: SourceModule, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        call = module.call_of[node]
        return call.last in _LOADS or (call.last in _CHANGES and _is_of_weights(module, node))
    return isinstance(node, ast.Assign | ast.AugAssign) and _writes_weight(node)


def _writes_weight(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(
        {"weight", "data", "bias", "param", "p", "w"} & names_in(target)
        for target in targets
        if isinstance(target, ast.Subscript | ast.Attribute)
    )


def _is_of_weights(module: SourceModule, node: ast.Call) -> bool:
    text = ast.unparse(node)
    scope = function_around(module, node)
    has_parameters = isinstance(scope, Function) and any(
        call.last in ("parameters", "named_parameters") for call in calls_in(module, scope)
    )
    return has_parameters or any(word in text for word in ("weight", "param", "bias", "head", "model"))


def _settings(module: SourceModule, name: str) -> list[Definition]:
    """Return the assignments of a name, and the calls of `register_buffer` that make it."""
    registered = [
        Definition(call.node, call.node)
        for call in module.calls_of("register_buffer")
        if isinstance(first := call.argument("name", 0), ast.Constant) and first.value == name
    ]
    return [*registered, *definitions(module.tree, name)]


def _changes(node: ast.AST, name: str, *, is_attribute: bool = False) -> bool:
    """Return whether a node sets a name or changes it in place; `is_attribute`: only one of an object, or an entry."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        elements = [part for target in targets for part in (getattr(target, "elts", None) or [target])]
        return any(_last(part) == name and not (is_attribute and isinstance(part, ast.Name)) for part in elements)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.endswith("_") and not node.func.attr.startswith("_") and _last(node.func.value) == name
    return False


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Attribute):
        return _last(node.value) if node.attr in ("data", "weight_data") else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def acts_at(modules: Sequence[SourceModule], place: tuple[str, int]) -> bool:
    """Return whether a line belongs to an environment: a method that is given actions, or a class that has one."""
    for module in modules:
        for owner in ast.walk(module.tree) if module.path == place[0] else ():
            if isinstance(owner, ast.ClassDef) and owner.lineno <= place[1] <= (owner.end_lineno or owner.lineno):
                methods = [item for item in owner.body if isinstance(item, Function)]
                if any(item.arg in _ACTIONS for method in methods for item in method.args.args):
                    return True
    return False
