"""Where the source gives a rank its part of the data by hand, and a sampler or framework divides that part again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_in,
    function_around,
    functions_named,
    names_in,
)
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import is_rank, mentions_rank
from instep.check.source.reaching import definitions

_SPLITS = frozenset(("array_split", "chunk", "split", "tensor_split", "random_split"))
_DEPTH = 5


def divided_twice(module: SourceModule) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield the calls that divide a dataset over ranks, with the code that has divided it by rank before."""
    for call, data in _divided(module):
        if (part := _part(module, data, call.node, _DEPTH)) is not None:
            yield call.node, part


def part_of(module: SourceModule, data: ast.expr, use: ast.expr) -> ast.expr | None:
    """Return the code that makes data a rank's part; None: it is not known to be one."""
    return _part(module, data, use, _DEPTH)


def sliced_by_rank(module: SourceModule) -> Iterator[tuple[str, ast.Subscript]]:
    """Yield the variables and attributes of which each rank takes its part by a slice, with the slice.

    Not those that hold the part afterwards, `rows = rows[rank::world_size]`, or a batch: `for x, rows in loader`.
    """
    ranks: dict[ast.AST, set[str]] = {}
    of_loops = {name for node in ast.walk(module.tree) if isinstance(node, ast.For) for name in names_in(node.target)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        scope = function_around(module, node)
        if scope not in ranks:
            ranks[scope] = _names_of_ranks(scope)
        if takes_part(node) or _selects(node, ranks[scope]):
            held = node.value
            name = held.attr if isinstance(held, ast.Attribute) else held.id if isinstance(held, ast.Name) else ""
            if (
                name
                and name not in of_loops
                and not any(mentions_rank(one.value) for one in definitions(module.tree, name))
            ):
                yield name, node


def _divided(module: SourceModule) -> Iterator[tuple[Call, ast.expr]]:
    """Yield the calls that divide data over all ranks, with the data."""
    for call in module.calls_of("DistributedSampler"):
        replicas = call.argument("num_replicas", 1)
        is_part = replicas is not None and (isinstance(replicas, ast.Constant) or "local" in ast.unparse(replicas))
        if not is_part and (data := call.argument("dataset", 0)) is not None:
            yield call, data
    for call in module.calls_of("prepare", "prepare_data_loader", "setup_dataloaders"):
        divides = call.argument("use_distributed_sampler")
        if isinstance(divides, ast.Constant) and divides.value is False:
            continue
        for data in [*call.node.args, *(keyword.value for keyword in call.node.keywords)]:
            yield call, data
    for call in module.calls_of("Trainer"):
        if call.name.startswith("transformers") and (data := call.argument("train_dataset")) is not None:
            yield call, data
    yield from _of_lightning(module)


def _of_lightning(module: SourceModule) -> Iterator[tuple[Call, ast.expr]]:
    """Yield the training loaders to which Lightning adds a DistributedSampler."""
    if not any(True for _ in module.calls_of("Trainer")) or any(
        "use_distributed_sampler" in line for line in module.lines
    ):
        return
    for function in functions_named(module, "train_dataloader"):
        for call in calls_in(module, function):
            data = call.argument("dataset", 0)
            if call.last == "DataLoader" and data is not None and call.argument("sampler") is None:
                yield call, data


def _part(module: SourceModule, data: ast.expr, use: ast.expr, depth: int, index: int | None = None) -> ast.expr | None:
    """Return the code that makes data, or one element of it, a rank's part; None: it is not known to be one."""
    if index is not None and isinstance(data, ast.Tuple) and index < len(data.elts):
        data = data.elts[index]
    for node in ast.walk(data):
        if isinstance(node, ast.expr) and takes_part(node):
            return node
    if not depth:
        return None
    for call in calls_in(module, data):
        for function in functions_named(module, call.last) if "." not in call.name else ():
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
            for value in returned:
                if (part := _part(module, value, value, depth - 1, index if call.node is data else None)) is not None:
                    return part
        if (part := _part_of_class(module, call)) is not None:
            return part
    return _part_of_names(module, data, use, depth)


def _part_of_names(module: SourceModule, data: ast.expr, use: ast.expr, depth: int) -> ast.expr | None:
    scope, names = function_around(module, use), _data_names(data)
    for one in (definition for name in sorted(names) for definition in definitions(scope, name)):
        is_source = one.value.lineno < use.lineno and one.value is not data
        if is_source and (part := _part(module, one.value, one.value, depth - 1, one.index)) is not None:
            return part
    if isinstance(scope, Function):
        for number, parameter in enumerate(item.arg for item in scope.args.args):
            for site in call_sites(module, scope) if parameter in names else ():
                given = site.argument(parameter, number)
                if given is not None and (part := _part(module, given, site.node, depth - 1)) is not None:
                    return part
    return None


def _data_names(data: ast.expr) -> set[str]:
    """Return the variables that data comes from, without those that only configure it: keyword arguments, ranks."""
    configured = {
        name
        for node in ast.walk(data)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg not in ("dataset", "indices", "train_dataset", None)
        for name in names_in(keyword.value)
    }
    return {name for name in names_in(data) - configured if "rank" not in name.lower() and name != "self"}


def takes_part(node: ast.expr) -> bool:
    """Return whether an expression is a rank's part of something: `x[rank::world_size]`, `x.shard(…, rank)`."""
    if isinstance(node, ast.Subscript):
        index = node.slice
        if isinstance(index, ast.Slice):
            return _is_stride(index.lower, index.step) or _is_stride(index.lower, index.upper)
        return is_rank(index) and isinstance(node.value, ast.Call) and _last(node.value) in _SPLITS
    if not isinstance(node, ast.Call):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    if _last(node) == "shard":
        return any(mentions_rank(argument) for argument in arguments)
    if _last(node) == "split_dataset_by_node":
        return True
    return _last(node) == "range" and len(arguments) == 3 and _is_stride(arguments[0], arguments[2])


def takes_chunk(node: ast.expr) -> bool:
    """Return whether an expression is one rank's piece of something: `x[rank * n : (rank + 1) * n]`."""
    index = node.slice if isinstance(node, ast.Subscript) else None
    is_split = index is not None and is_rank(index) and isinstance(node.value, ast.Call)  # type: ignore[attr-defined]
    return (is_split and takes_part(node)) or (
        isinstance(index, ast.Slice) and index.step is None and _is_stride(index.lower, index.upper)
    )


def _is_stride(start: ast.expr | None, other: ast.expr | None) -> bool:
    """Return whether a range begins at a place that the rank gives, and has an end or a step."""
    return start is not None and other is not None and mentions_rank(start)


def _part_of_class(module: SourceModule, call: Call) -> ast.expr | None:
    """Return where a dataset class of this file keeps the rank's part only: one that is given the rank, or a stream."""
    if (part := own_part_of_stream(module, call.last)) is not None:
        return part
    if not any(mentions_rank(argument) for argument in [*call.node.args, *(k.value for k in call.node.keywords)]):
        return None
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name == call.last:
            parts = [inner for inner in ast.walk(node) if isinstance(inner, ast.expr) and takes_part(inner)]
            return parts[0] if parts else None
    return None


def own_part_of_stream(module: SourceModule, name: str) -> ast.expr | None:
    """Return where an IterableDataset of this file yields the part of a rank, which it asks for itself."""
    for owner in ast.walk(module.tree):
        if not isinstance(owner, ast.ClassDef) or owner.name != name:
            continue
        if not any(ast.unparse(base).endswith("IterableDataset") for base in owner.bases):
            return None
        for function in (node for node in ast.walk(owner) if isinstance(node, Function)):
            ranks = _names_of_ranks(function)
            for node in ast.walk(function):
                if isinstance(node, ast.expr) and (takes_part(node) or _selects(node, ranks)):
                    return node
    return None


def _names_of_ranks(function: ast.AST) -> set[str]:
    """Return the variables that hold the rank, or a number that is made of it by arithmetic."""
    names: set[str] = set()
    for _ in range(3):
        for targets, value in assignments(function):
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            is_number = not any(isinstance(part, ast.Call | ast.Subscript) and not is_rank(part) for part in parts)
            if (is_number or any(is_rank(part) for part in parts)) and (
                mentions_rank(value) or names_in(value) & names
            ):
                names |= targets
    return names


def _selects(node: ast.expr, ranks: set[str]) -> bool:
    """Return whether an expression selects by variables that follow from the rank: `files[part::parts]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        start, step = node.slice.lower, node.slice.step or node.slice.upper
        return start is not None and step is not None and bool(names_in(start) & ranks)
    if isinstance(node, ast.Call) and _last(node) in ("islice", "range") and len(node.args) >= 3:
        return any(names_in(argument) & ranks for argument in node.args[-3:-1])
    if isinstance(node, ast.Compare):
        has_modulo = any(isinstance(inner, ast.Mod) for inner in ast.walk(node))
        return has_modulo and bool(names_in(node) & ranks or mentions_rank(node))
    return False


def _last(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
