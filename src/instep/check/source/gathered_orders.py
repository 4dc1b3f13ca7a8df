"""Where the source puts results that were gathered rank by rank beside something in the order of the dataset."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.check.source.collective_calls import is_collective
from instep.check.source.functions import (
    Function,
    assignments,
    call_sites,
    calls_in,
    function_around,
    functions_named,
    is_imported,
    names_in,
)
from instep.check.source.hand_shards import takes_chunk, takes_part
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import mentions_rank

_TO_ALL = ("all_gather", "all_gather_into_tensor", "all_gather_object")
_TO_ONE = ("gather", "gather_object")
_JOINS = ("cat", "concat", "concatenate", "hstack", "vstack", "sum", "chain", "from_iterable")
_KEEPS_ORDER = frozenset(
    (
        *("cpu", "numpy", "tolist", "detach", "clone", "float", "long", "int", "double", "to", "astype", "contiguous"),
        *("argmax", "softmax", "sigmoid", "round", "clip", "clamp", "squeeze", "list", "array", "asarray", "Series"),
        *("exp", "log", "sqrt", "abs", "expm1", "from_numpy", "as_tensor", "tensor", "max", "min"),
    )
)
"""Functions and methods whose result has as many rows as what they are given, in the same order."""
_LABELS = ("targets", "labels", "y", "tensors", "label", "target")
_TABLES = ("DataFrame", "Table", "from_dict", "from_pydict")
_READS_TABLE = ("DataFrame", "read_csv", "read_parquet", "read_json")
_COLUMNS = ("column_stack", "c_")
_ROUNDS = 6
"""How many steps an order is followed through variables, functions and their callers."""


@dataclass(frozen=True)
class MisplacedResults:
    """Gathered results that are put beside rows in another order."""

    gathered: ast.expr
    """Where they are gathered, as far as it can be told."""
    used: ast.expr
    beside: ast.expr
    """The rows in the dataset's order."""


def misplaced_results(module: SourceModule) -> Iterator[MisplacedResults]:
    """Yield results of all ranks, who take turns, that are put beside rows in the dataset's order."""
    if not _deals_in_turn(module):
        return
    flow = _Flow(module)
    for scope, names in flow.gathered.items():
        if names:
            yield from _pairs(module, flow, scope)


def _deals_in_turn(module: SourceModule) -> bool:
    """Return whether ranks get every n-th sample, and none a piece of the data."""
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.expr)]
    if any(takes_chunk(node) for node in nodes):
        return False
    return any(True for _ in module.calls_of("DistributedSampler")) or any(takes_part(node) for node in nodes)


class _Flow:
    """Which variables hold the results of all ranks, first those of rank 0, and which functions return such."""

    def __init__(self, module: SourceModule) -> None:
        self._module = module
        self.gathered: dict[ast.AST, set[str]] = {}
        self.by_rank: dict[ast.AST, set[str]] = {}
        """Of these, lists with an element for each rank."""
        self._returned: set[ast.AST] = set()
        for call in module.calls:
            if call.last in (*_TO_ALL, *_TO_ONE) and is_collective(call) and self._is_per_sample(call):
                self._of(call.node).update(_filled(call))
                if call.last != "all_gather_into_tensor":
                    self.by_rank.setdefault(function_around(module, call.node), set()).update(_filled(call))
        for _ in range(_ROUNDS if self.gathered else 0):
            for scope in list(self.gathered):
                self._follow(scope)
            self._call()

    def holds(self, scope: ast.AST, value: ast.expr) -> bool:
        """Return whether an expression of a function is gathered results, still in the order of the ranks."""
        if isinstance(value, ast.Name):
            return value.id in self.gathered.get(scope, ())
        if isinstance(value, ast.Tuple | ast.List):
            return any(self.holds(scope, element) for element in value.elts)
        if isinstance(value, ast.Subscript):
            return _keeps_rows(value.slice) and self.holds(scope, value.value)
        if isinstance(value, ast.ListComp | ast.GeneratorExp):
            return self.holds(scope, value.generators[0].iter)
        if isinstance(value, ast.BinOp | ast.Compare):
            sides = [value.left, value.right] if isinstance(value, ast.BinOp) else [value.left, *value.comparators]
            return any(self.holds(scope, side) for side in sides)
        if isinstance(value, ast.IfExp):
            return self.holds(scope, value.body) or self.holds(scope, value.orelse)
        if isinstance(value, ast.Starred):
            return self.holds(scope, value.value)
        return isinstance(value, ast.Call) and self._returns(scope, self._module.call_of[value])

    def _returns(self, scope: ast.AST, call: Call) -> bool:
        own = () if is_imported(self._module, call) else functions_named(self._module, call.last)
        if any(function in self._returned for function in own):
            return True
        if call.last not in _KEEPS_ORDER and call.last not in _JOINS:
            return False
        if any(self.holds(scope, argument) for argument in call.node.args):
            return True
        owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
        return owner is not None and call.last not in _JOINS and self.holds(scope, owner)

    def origin(self, scope: ast.AST, value: ast.expr, depth: int = _ROUNDS) -> ast.expr | None:
        """Return the call that gathers an expression's results; None: not in this function or those that it calls."""
        if not depth:
            return None
        for call in calls_in(self._module, value):
            for function in functions_named(self._module, call.last) if self._returns(scope, call) else ():
                given = [*call.node.args, *(keyword.value for keyword in call.node.keywords)]
                if any(_joins(argument) or self._has_rows(scope, argument, 0) for argument in given):
                    return call.node
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and node.value is not None and self.holds(function, node.value):
                        return self.origin(function, node.value, depth - 1)
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} & self.gathered.get(scope, set())
        for call in calls_in(self._module, scope):
            if call.last in (*_TO_ALL, *_TO_ONE) and is_collective(call) and _filled(call) & names:
                return call.node
        made = [one for targets, one in assignments(scope) if targets & names and self.holds(scope, one)]
        return next((place for one in made if (place := self.origin(scope, one, depth - 1)) is not None), None)

    def _of(self, node: ast.AST) -> set[str]:
        return self.gathered.setdefault(function_around(self._module, node), set())

    def _follow(self, scope: ast.AST) -> None:
        """Follow the results through the variables of a function to what it returns."""
        names = self.gathered[scope]
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and self.holds(scope, statement.value):
                for target in statement.targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    names.update(part.id for part in parts if isinstance(part, ast.Name))
            elif isinstance(statement, ast.Return) and statement.value and self.holds(scope, statement.value):
                self._returned.add(scope)
        for call in calls_in(self._module, scope):
            if call.last in ("append", "extend") and call.node.args and self.holds(scope, call.node.args[0]):
                names.add(call.name.rpartition(".")[0])
        names -= self._put_in_order(scope)

    def _put_in_order(self, scope: ast.AST) -> set[str]:
        """Return the variables that a function sets to something else made of gathered results, or sorts."""
        put: set[str] = set()
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and names_in(statement.value) & self.gathered[scope]:
                is_same = self.holds(scope, statement.value)
                for target in statement.targets:
                    if isinstance(target, ast.Name) and not is_same:
                        put.add(target.id)
                    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                        put.add(target.value.id)
        return put | {call.name.rpartition(".")[0] for call in calls_in(self._module, scope) if call.last == "sort"}

    def _call(self) -> None:
        """Follow the results to the functions that are called with them, and to those that call what returns them."""
        for call in self._module.calls:
            scope = function_around(self._module, call.node)
            own = () if is_imported(self._module, call) else functions_named(self._module, call.last)
            for function in own:
                if function in self._returned:
                    self.gathered.setdefault(scope, set())
                for number, parameter in enumerate(_parameters(function)):
                    given = call.argument(parameter, number)
                    if given is not None and self.holds(scope, given):
                        self.gathered.setdefault(function, set()).add(parameter)

    def _is_per_sample(self, call: Call) -> bool:
        """Return whether what is gathered has a row for each sample, not one value for each rank."""
        source = _source(call)
        return source is not None and self._has_rows(function_around(self._module, call.node), source, 3)

    def _has_rows(self, scope: ast.AST, value: ast.expr, depth: int) -> bool:
        if _joins(value):
            return True
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if any(targets & names and _joins(one) for targets, one in assignments(scope)):
            return True
        if any(
            call.last in ("append", "extend") and call.name.rpartition(".")[0] in names
            for call in calls_in(self._module, scope)
        ):
            return True
        if not isinstance(scope, Function) or not depth:
            return False
        given = [
            (site, argument)
            for number, parameter in enumerate(_parameters(scope))
            for site in (call_sites(self._module, scope) if parameter in names else ())
            if (argument := site.argument(parameter, number)) is not None
        ]
        return any(
            self._has_rows(function_around(self._module, site.node), argument, depth - 1) for site, argument in given
        )


def _pairs(module: SourceModule, flow: _Flow, scope: ast.AST) -> Iterator[MisplacedResults]:
    """Yield the gathered results of a function that it puts beside others, row by row."""
    whole = {
        name
        for targets, value in assignments(scope)
        if _is_of_dataset(value) and not mentions_rank(value)
        for name in targets - flow.gathered[scope]
    }
    for node in ast.walk(scope):
        if function_around(module, node) is not scope:
            continue
        for sides, is_certain in _sides(module, node):
            beside = [side for side in sides if not flow.holds(scope, side)]
            lists = flow.by_rank.get(scope, set())
            if any(isinstance(side, ast.Name) and side.id in lists for side in sides if side not in beside):
                continue
            if len(beside) == len(sides) or any(mentions_rank(side) or _is_of_ranks(side) for side in beside):
                continue
            beside = [side for side in beside if names_in(side) - flow.gathered[scope] - {"torch", "np"}]
            others = [side for side in beside if is_certain or names_in(side) & whole or _is_of_dataset(side)]
            if others and isinstance(node, ast.expr | ast.stmt):
                held = next(side for side in sides if flow.holds(scope, side))
                used = _expression(node)
                yield MisplacedResults(flow.origin(scope, held) or used, used, others[0])
                break


def _sides(module: SourceModule, node: ast.AST) -> Iterator[tuple[list[ast.expr], bool]]:
    """Yield the expressions that a node puts side by side, and whether it does so row by row for certain."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        yield [node.left, node.comparators[0]], False
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        tables = module.assigned.get(target.value.id, []) if isinstance(target.value, ast.Name) else []
        if any(isinstance(value, ast.Call) and module.call_of[value].last in _READS_TABLE for value in tables):
            yield [target.value, node.value], True
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Name):
        if node.slice.id in _numbers_of_batches(module, node):
            yield [node.value, node.slice], True
    elif isinstance(node, ast.For) and (index := _numbered(node)) is not None:
        rows = [
            inner
            for statement in node.body
            for inner in ast.walk(statement)
            if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Name) and inner.slice.id == index
        ]
        if rows and isinstance(node.iter, ast.Call):
            yield [node.iter.args[0], *(row.value for row in rows)], True
    elif isinstance(node, ast.Call):
        call = module.call_of[node]
        if call.last in _TABLES and node.args and isinstance(node.args[0], ast.Dict):
            yield node.args[0].values, True
        elif call.last in _COLUMNS and node.args and isinstance(node.args[0], ast.Tuple | ast.List):
            yield node.args[0].elts, True
        elif len(node.args) >= 2:
            yield node.args if call.last == "zip" else node.args[:2], call.last == "zip"


def _numbers_of_batches(module: SourceModule, node: ast.AST) -> set[str]:
    """Return the variables that loops over batches or samples set, around a node: `for x, y, index in loader`."""
    loops = [outer for outer in module.around(node) if isinstance(outer, ast.For)]
    over = [loop for loop in loops if ast.unparse(getattr(loop.iter, "func", loop.iter)) != "range"]
    return {inner.id for loop in over for inner in ast.walk(loop.target) if isinstance(inner, ast.Name)}


def _numbered(loop: ast.For) -> str | None:
    """Return the number's variable of a loop over `enumerate(…)`."""
    is_numbered = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate" and loop.iter.args
    if not is_numbered or not isinstance(loop.target, ast.Tuple) or not isinstance(loop.target.elts[0], ast.Name):
        return None
    return loop.target.elts[0].id


def _expression(node: ast.expr | ast.stmt) -> ast.expr:
    return node.iter if isinstance(node, ast.For) else node.value if isinstance(node, ast.Assign) else node  # type: ignore[return-value]


def _filled(call: Call) -> set[str]:
    """Return the variables that a collective fills."""
    if call.last in _TO_ONE:
        filled = call.argument("gather_list", 1) or call.argument("object_gather_list")
    else:
        names = ("tensor_list", "object_list", "output_tensor")
        filled = next((one for name in names if (one := call.argument(name, 0)) is not None), None)
    return {node.id for node in ast.walk(filled) if isinstance(node, ast.Name)} if filled is not None else set()


def _source(call: Call) -> ast.expr | None:
    """Return what a collective gathers."""
    if call.last in _TO_ONE:
        return call.argument("tensor", 0) or call.argument("obj")
    names = ("tensor", "obj", "input_tensor")
    return next((one for name in names if (one := call.argument(name, 1)) is not None), None)


def _joins(value: ast.expr) -> bool:
    """Return whether an expression joins what came batch by batch."""
    return any(
        isinstance(node, ast.ListComp)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("cat", "concat", "concatenate")))
        for node in ast.walk(value)
    )


def _keeps_rows(index: ast.expr) -> bool:
    """Return whether an index leaves the rows in their order: `[:n]`, `[:, 1]`, `["key"]`."""
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    return isinstance(first, ast.Slice) and first.step is None


def _is_of_dataset(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in _LABELS and "data" in ast.unparse(node.value).lower()
        for node in ast.walk(value)
    )


def _is_of_ranks(side: ast.expr) -> bool:
    """Return whether something has an element for each rank."""
    return any("world" in name.lower() or "rank" in name.lower() for name in names_in(side))


def _parameters(function: Function) -> list[str]:
    """Return the parameters that a call gives by position, without `self`."""
    names = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] == ["self"] else names
