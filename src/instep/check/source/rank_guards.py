"""Which code only some ranks execute: `if rank == 0:`, `if not is_main_process(): return`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.check.source.functions import Function, assignments, call_sites, function_around, names_in
from instep.check.source.module import SourceModule

_OF = "ddp|dp|dist|global|local|node|world|process|proc|my|cur|current|this|gpu|data_parallel|fsdp|tp|pp|sp"
_RANK = re.compile(rf"^_?(({_OF})_)*rank$|^(process_index|SLURM_PROCID)$", re.IGNORECASE)
"""Not every name with `rank` in it: `lora_rank` is none."""
_DEVICE = re.compile(r"^(gpu|gpu_id|gpu_index|device_id|device_index)$", re.IGNORECASE)
"""What scripts with one process for each GPU compare with 0 instead of the local rank."""
_MAIN = re.compile(
    r"^_?(is_((local|world|global)_)?(main|master|chief|primary|zero|leader|first|rank_?zero|rank_?0)"
    r"(_process|_rank|_proc|_node)?|is_world_process_zero|is_local_process_zero|should_(save|log)"
    r"|(local_)?(main|master)_process|rank_?zero|rank_?0|master|main|chief|leader|coordinator|is_root|is_coordinator)$",
    re.IGNORECASE,
)
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


@dataclass(frozen=True)
class RankGuard:
    """A condition that differs by rank."""

    is_main: bool
    """Whether the code runs on the first rank; otherwise, on the others."""
    is_local: bool
    """Whether the rank within the node decides."""
    node: ast.stmt | ast.expr


def rank_guard(module: SourceModule, node: ast.AST) -> RankGuard | None:
    """Return the condition on the rank under which a node is executed in its function; None: all ranks execute it."""
    inner: ast.AST = node
    for outer in module.around(node):
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            test = rank_test(module, outer.test)
            if test is not None:
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if inner in body:
                    return test
                if not _excludes(module, outer.test, inner):
                    return _negated(test)
        for statement in _earlier(outer, inner):
            if (test := _left_by(module, statement)) is not None:
                return _negated(test)
        if isinstance(outer, Function | ast.Lambda):
            return None
        inner = outer
    return None


def guard_of_callers(module: SourceModule, node: ast.AST, depth: int = 3) -> RankGuard | None:
    """Return the condition on the rank of a node, or of all calls of its function; None: all ranks may execute it."""
    if (guard := rank_guard(module, node)) is not None:
        return guard
    function = function_around(module, node)
    if not isinstance(function, Function) or not depth:
        return None
    if any(_rank_zero_only(decorator) for decorator in function.decorator_list):
        return RankGuard(is_main=True, is_local=False, node=function)
    guards = [guard_of_callers(module, call.node, depth - 1) for call in call_sites(module, function)]
    return guards[0] if guards and all(guards) else None


def rank_test(module: SourceModule, test: ast.expr) -> RankGuard | None:
    """Return what a condition says about the rank; None: nothing."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = rank_test(module, test.operand)
        return _negated(inner) if inner is not None else None
    if isinstance(test, ast.BoolOp):
        return next((guard for value in test.values if (guard := rank_test(module, value)) is not None), None)
    if isinstance(test, ast.Compare):
        return _compared(module, test)
    if isinstance(test, ast.Name) and (value := _assigned_test(module, test.id)) is not None:
        return rank_test(module, value)
    name = _last(test)
    if _MAIN.match(name):
        return RankGuard(is_main=True, is_local="local" in name.lower(), node=test)
    if is_rank(test):  # `if rank:`
        return RankGuard(is_main=False, is_local=_is_local(test), node=test)
    return None


def _excludes(module: SourceModule, test: ast.expr, branch: ast.AST) -> bool:
    """Return whether an `elif` asks again for what else had to hold: all ranks may be in it, or none.

    `if not in_order and is_main: … elif in_order: …`
    """
    if not isinstance(branch, ast.If) or not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return False
    others = [value for value in test.values if rank_test(module, value) is None]
    return any((names_in(other) & names_in(branch.test)) - {"self"} for other in others)


def is_rank(node: ast.expr) -> bool:
    """Return whether an expression is this process's rank, by its name."""
    if isinstance(node, ast.Call):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if _last(node.func) in ("get_rank", "get_local_rank", "get_node_local_rank"):
            return True
        return _last(node.func) in ("int", "get", "getenv") and any(is_rank(argument) for argument in arguments)
    if isinstance(node, ast.Subscript):
        return is_rank(node.slice)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(_RANK.search(node.value))
    return bool(_RANK.search(_last(node)))


def mentions_rank(node: ast.AST) -> bool:
    """Return whether a rank occurs anywhere in a piece of code."""
    return any(isinstance(inner, ast.expr) and is_rank(inner) for inner in ast.walk(node))


def _compared(module: SourceModule, test: ast.Compare) -> RankGuard | None:
    sides = [test.left, *test.comparators]
    numbers = [side for side in sides if isinstance(side, ast.Constant) and type(side.value) is int]
    rank = next((side for side in sides if not isinstance(side, ast.Constant) and is_rank(side)), None)
    rank = rank or next((side for side in sides if numbers and _DEVICE.match(_last(side))), None)
    if rank is None or len(sides) != 2 or all(is_rank(side) for side in sides):
        return None
    is_main = isinstance(test.ops[0], ast.Eq | ast.In | ast.Lt | ast.LtE | ast.Is)
    compare = _COMPARED.get(type(test.ops[0]))
    if compare is not None and (number := _number(next(side for side in sides if side is not rank))) is not None:
        ranks = sorted({0, 1, *(max(0, number + near) for near in (-1, 0, 1))})  # beyond these nothing changes
        holds = [compare(*((each, number) if rank is test.left else (number, each))) for each in ranks]
        if len(set(holds)) == 1:  # `rank >= 0`, `rank != -1`: whether there are several ranks at all
            return None
        is_main = holds[0]
    return RankGuard(is_main=is_main, is_local=_is_local(rank) or _is_set_to_local(module, rank), node=test)


def _number(node: ast.expr) -> int | None:
    """Return a whole number of the source, `-1` as well."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return None if (value := _number(node.operand)) is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_set_to_local(module: SourceModule, rank: ast.expr) -> bool:
    """Return whether a variable was set to the rank within the node: `self.gpu_id = int(os.environ["LOCAL_RANK"])`."""
    name = _last(rank)
    return any(name in names and is_rank(value) and _is_local(value) for names, value in assignments(module.tree))


def _assigned_test(module: SourceModule, name: str) -> ast.expr | None:
    """Return the comparison that a variable was set to, once: `is_first = rank == 0`."""
    values = module.assigned.get(name, [])
    is_test = len(values) == 1 and isinstance(values[0], ast.Compare | ast.BoolOp)
    names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    return values[0] if is_test and name not in names else None  # `x = x and y` would lead nowhere


def _earlier(outer: ast.AST, inner: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a block that come before one of them."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(outer, field, None)
        if isinstance(block, list) and inner in block:
            yield from block[: block.index(inner)]


def _left_by(module: SourceModule, statement: ast.stmt) -> RankGuard | None:
    """Return the condition under which ranks leave the block at a statement; None: they do not."""
    if not isinstance(statement, ast.If) or statement.orelse or not _leaves(statement.body[-1]):
        return None
    return rank_test(module, statement.test)


def _leaves(statement: ast.stmt) -> bool:
    is_exit = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return isinstance(statement, _LEAVES) or (is_exit and _last(statement.value.func) in ("exit", "_exit"))  # type: ignore[attr-defined]


def _rank_zero_only(decorator: ast.expr) -> bool:
    name = _last(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name in ("rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only", "master_only")


def _negated(guard: RankGuard) -> RankGuard:
    return RankGuard(is_main=not guard.is_main, is_local=guard.is_local, node=guard.node)


def _is_local(node: ast.expr) -> bool:
    return "local" in ast.unparse(node).lower()


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
