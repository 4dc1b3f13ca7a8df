"""Where the source divides a sum over all ranks by a count of one, or sums a sum again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import assignments, calls_in, function_around, loops_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import syncs

_WORLD = re.compile(
    r"world|num_proc|n_?gpus?\b|num_gpus|replicas|num_ranks|n_ranks|\bws\b|get_world_size", re.IGNORECASE
)
_LOADER = re.compile(r"loader|_dl$|^dl$|batches|sampler", re.IGNORECASE)
_RESETS = ("zero_", "fill_", "copy_", "div_", "mul_")
_ADDS = ("add_", "addcmul_")


def half_reduced_ratios(module: SourceModule) -> Iterator[tuple[ast.BinOp, str, str]]:
    """Yield divisions of which one side was summed over the ranks, with the summed side and the other."""
    for scope in {function_around(module, call.node): None for call in module.calls if _sums(call)}:
        sums = _summed(module, scope)
        if not sums or _mentions_world(scope):
            continue
        shared = _follow(scope, set(sums))
        local = _counted(module, scope) - shared
        for node in ast.walk(scope):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            first = min(sums.values())
            above, below = _variables(node.left), _variables(node.right)
            count = _count(node.right, below, local)
            if node.lineno < first or _is_reduced_later(module, scope, node):
                continue
            if above & shared and count:
                yield node, ast.unparse(node.left), count


def sums_of_sums(module: SourceModule) -> Iterator[tuple[ast.Call, str]]:
    """Yield reductions in place of a counter that goes on counting, with its name."""
    for call in module.calls:
        if not _sums(call) or call.last != "all_reduce" or not call.node.args:
            continue
        loop = next(loops_around(module, call.node), None)
        name = ast.unparse(call.node.args[0])
        if loop is None or not isinstance(call.node.args[0], ast.Name | ast.Attribute):
            continue
        is_of_loop = isinstance(loop, ast.For) and bool(_variables(loop.target) & _variables(call.node.args[0]))
        if not is_of_loop and _is_added_to(loop, name) and not _is_reset(loop, name):
            yield call.node, name


def _sums(call: Call) -> bool:
    if call.last not in ("all_reduce", "reduce") or not is_collective(call) or "accel" in call.name.lower():
        return False
    operation = call.argument("op", 2 if call.last == "reduce" else 1)
    return operation is None or ast.unparse(operation).endswith("SUM")


def _summed(module: SourceModule, scope: ast.AST) -> dict[str, int]:
    """Return the variables that a function sums over the ranks in place, with the line."""
    sums: dict[str, int] = {}
    for call in calls_in(module, scope):
        if not _sums(call) or not call.node.args or function_around(module, call.node) is not scope:
            continue
        argument = call.node.args[0]
        if isinstance(argument, ast.Name):
            sums[argument.id] = call.node.lineno
            for loop in loops_around(module, call.node):  # `for t in (hits, seen): dist.all_reduce(t)`
                of_loop = isinstance(loop, ast.For) and _variables(loop.target) == {argument.id}
                if of_loop and isinstance(loop.iter, ast.Tuple | ast.List):  # type: ignore[union-attr]
                    sums |= dict.fromkeys(_variables(loop.iter), call.node.lineno)  # type: ignore[union-attr]
    return sums


def _follow(scope: ast.AST, names: set[str]) -> set[str]:
    """Return variables, and those that are set from them."""
    followed = set(names)
    for _ in range(4):
        for targets, value in assignments(scope):
            if _variables(value) & followed:
                followed |= targets
    return followed


def _counted(module: SourceModule, scope: ast.AST) -> set[str]:
    """Return the variables that a loop of a function counts up, batch by batch."""
    return {
        node.target.id
        for node in ast.walk(scope)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name)
        if any(True for _ in loops_around(module, node)) and not _brings_together(module, node.value)
    }


def _brings_together(module: SourceModule, value: ast.expr) -> bool:
    return any(syncs(call) for call in calls_in(module, value))


def _count(divisor: ast.expr, names: set[str], local: set[str]) -> str:
    """Return what a divisor counts on this rank alone; empty: it is no such count."""
    if names & local:
        return ast.unparse(divisor)
    if any(isinstance(node, ast.BinOp) for node in ast.walk(divisor)):
        return ""
    for node in ast.walk(divisor):
        is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
        if is_length and node.args and _LOADER.search(_last(node.args[0])):  # type: ignore[attr-defined]
            return ast.unparse(node)
    return ""


def _is_reduced_later(module: SourceModule, scope: ast.AST, node: ast.BinOp) -> bool:
    """Return whether the result of a division goes through a collective once more."""
    statement = next(module.statements_around(node), None)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {name for target in targets for name in _variables(target)}
    later = [call for call in calls_in(module, scope) if call.node.lineno >= node.lineno and syncs(call)]
    return any(names & names_in(call.node) or node in set(ast.walk(call.node)) for call in later)


def _mentions_world(scope: ast.AST) -> bool:
    """Return whether a function computes with the number of ranks, in a product or a quotient."""
    return any(
        isinstance(node, ast.BinOp | ast.AugAssign)
        and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)
        and _WORLD.search(ast.unparse(node))
        for node in ast.walk(scope)
    )


def _is_added_to(loop: ast.AST, name: str) -> bool:
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _held(node.target) == name:
            return True
        adds = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS
        if adds and _held(node.func.value) == name:  # type: ignore[attr-defined]
            return True
    return False


def _is_reset(loop: ast.AST, name: str) -> bool:
    """Return whether a loop sets a counter anew, or makes it a mean."""
    for node in ast.walk(loop):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(_held(inner) == name for target in targets for inner in _elements(target)):
            return True
        if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add) and _held(node.target) == name:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = _held(node.func.value)
            if (owner == name and node.func.attr in _RESETS) or node.func.attr.startswith("reset"):
                return True
    return False


def _elements(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _held(node: ast.expr) -> str:
    """Return the variable or attribute that an element belongs to, as it is written."""
    return _held(node.value) if isinstance(node, ast.Subscript) else ast.unparse(node)


def _variables(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
