"""Where the source numbers the elements of a set: strings come in another order in each process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.functions import functions_named, is_imported
from instep.check.source.module import SourceModule
from instep.check.source.reaching import reaching

_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
_KEEP_ORDER = ("list", "tuple", "iter", "filter", "map")
_INTEGERS = ("range(", ".tolist(", "int(", ".numpy(", "bincount", ".item(", "len(", "ord(")
_DEPTH = 4


def numbered_sets(module: SourceModule) -> Iterator[ast.expr]:
    """Yield the expressions that give numbers to the elements of a set in its own order."""
    for call in module.calls:
        args = call.node.args
        if call.name == "enumerate" and args and _is_unordered(module, args[0]):
            if _makes_numbering(module, call.node):
                yield call.node
        elif call.name == "zip" and len(args) == 2 and _counts(args[1]) and _is_unordered(module, args[0]):
            yield call.node
        elif call.last == "index" and isinstance(call.node.func, ast.Attribute):
            if _is_unordered(module, call.node.func.value):
                yield call.node
        elif call.name == "dict.fromkeys" and args and _is_unordered(module, args[0]):
            yield call.node


def parts_of_sets(module: SourceModule) -> Iterator[ast.expr]:
    """Yield slices of a set's elements in its own order, and shuffles of them: a seed does not help."""
    for node in ast.walk(module.tree):
        is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        if is_slice and isinstance(node.ctx, ast.Load) and _is_unordered(module, node.value):  # type: ignore[attr-defined]
            yield node  # type: ignore[misc]
    for call in module.calls:
        is_draw = call.last in ("shuffle", "sample") and len(call.node.args) > 0
        if is_draw and isinstance(call.node.args[0], ast.Name) and _is_unordered(module, call.node.args[0]):
            yield call.node


def hashed_names(module: SourceModule) -> Iterator[ast.expr]:
    """Yield what is computed from the hash of something that may be a string: a bucket, a seed, a rank's share."""
    for call in module.calls:
        if call.name != "hash" or len(call.node.args) != 1 or _is_of_integers(call.node.args[0]):
            continue
        outer = next(iter(module.around(call.node)), None)
        is_abs = isinstance(outer, ast.Call) and module.call_of[outer].name == "abs"
        outer = next(iter(module.around(outer)), None) if is_abs and outer is not None else outer
        if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mod | ast.BitAnd):
            yield call.node


def _is_of_integers(value: ast.expr) -> bool:
    """Return whether what is hashed consists of numbers, as far as its names tell."""
    text = ast.unparse(value)
    if any(isinstance(node, ast.JoinedStr) for node in ast.walk(value)) or "str(" in text or "'" in text:
        return False
    if not any(isinstance(node, ast.Name | ast.Attribute) for node in ast.walk(value)):
        return True
    return bool(re.search(r"seed|epoch|rank|step|worker|index|idx|\bi\b|\bint\(", text))


def _makes_numbering(module: SourceModule, node: ast.Call) -> bool:
    """Return whether the numbers are kept: in a dict, or as an element that is set."""
    for outer in module.around(node):
        if isinstance(outer, ast.DictComp):
            return True
        if isinstance(outer, ast.Call) and module.call_of[outer].name == "dict":
            return True
        if isinstance(outer, ast.For):
            return any(
                isinstance(inner, ast.Assign) and any(isinstance(target, ast.Subscript) for target in inner.targets)
                for inner in ast.walk(outer)
            )
        if isinstance(outer, ast.stmt):
            return False
    return False


def _counts(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "count", "itertools.count")


def _is_unordered(module: SourceModule, value: ast.expr, depth: int = _DEPTH) -> bool:
    """Return whether an expression goes through a set of something other than integers, in the set's own order."""
    if not depth or any(word in ast.unparse(value) for word in _INTEGERS):
        return False
    if isinstance(value, ast.Set | ast.SetComp):
        return True
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return any(_is_unordered(module, side, depth - 1) for side in (value.left, value.right))
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        return _is_unordered(module, value.generators[0].iter, depth - 1)
    if isinstance(value, ast.List | ast.Tuple):
        return any(_is_unordered(module, item.value, depth) for item in value.elts if isinstance(item, ast.Starred))
    if isinstance(value, ast.Call):
        return _is_unordered_call(module, value, depth)
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    if isinstance(value, ast.Name) and (reached := reaching(module, name, value)):
        return all(_is_unordered(module, one.value, depth - 1) for one in reached) and not _is_sorted(module, name)
    return bool(name) and _is_set_to_unordered(module, name, depth)


def _is_unordered_call(module: SourceModule, value: ast.Call, depth: int) -> bool:
    call = module.call_of[value]
    if call.name in ("set", "frozenset"):
        return bool(value.args)
    if call.name in _KEEP_ORDER and value.args:
        return _is_unordered(module, value.args[-1], depth - 1)
    if call.last in _OF_SETS and isinstance(value.func, ast.Attribute):
        return True
    if is_imported(module, call):
        return False
    returned = [
        node.value
        for function in functions_named(module, call.last)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    return bool(returned) and all(_is_unordered(module, one, depth - 1) for one in returned)


def _is_set_to_unordered(module: SourceModule, name: str, depth: int) -> bool:
    """Return whether a variable or attribute is only ever set to what is unordered, and never sorted in place."""
    values = [
        node.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if _name(target) == name
    ]
    adds = any(
        call.last == "add" and isinstance(call.node.func, ast.Attribute) and _name(call.node.func.value) == name
        for call in module.calls
    )
    empty = [value for value in values if ast.unparse(value) == "set()"]
    others = [value for value in values if value not in empty]
    if _is_sorted(module, name) or not values:
        return False
    return (bool(others) or (adds and bool(empty))) and all(_is_unordered(module, one, depth - 1) for one in others)


def _is_sorted(module: SourceModule, name: str) -> bool:
    return any(
        call.last == "sort" and isinstance(call.node.func, ast.Attribute) and _name(call.node.func.value) == name
        for call in module.calls
    )


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
