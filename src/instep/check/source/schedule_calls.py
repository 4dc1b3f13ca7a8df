"""Where the source makes learning-rate schedules, and in which unit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, calls_in, function_around, functions_named, names_in, trains
from instep.check.source.module import SourceModule

_IN_EPOCHS = {"CosineAnnealingLR": ("T_max", 1), "StepLR": ("step_size", 1), "MultiStepLR": ("milestones", 1)}
"""The argument of a scheduler that counts its steps."""
_RANKS = {"num_processes", "world_size"}


def is_scheduler(module: SourceModule, node: ast.expr) -> bool:
    """Return whether an expression is a learning-rate scheduler: by its name, or by what it was set to."""
    name = _last(node)
    return "sched" in name.lower() or any(makes_schedule(module, value) for value in _values(module, name))


def made_in_epochs(module: SourceModule, node: ast.expr) -> ast.Call | None:
    """Return the call that makes a scheduler whose length counts epochs; None: it counts something else."""
    for value in _values(module, _last(node)):
        if isinstance(value, ast.Call) and (length_of := _IN_EPOCHS.get(_last(value.func))) is not None:
            name, position = length_of
            length = next((item.value for item in value.keywords if item.arg == name), None)
            if length is None and len(value.args) > position:
                length = value.args[position]
            if length is not None and _counts_epochs(length):
                return value
    return None


def prepared_schedules(module: SourceModule) -> Iterator[ast.Call]:
    """Yield calls of `accelerator.prepare` with a scheduler whose length was taken from a prepared loader."""
    if any(_steps_once(call.node) for call in module.calls_of("Accelerator")):
        return
    prepares = [call for call in module.calls if call.last == "prepare" and "accel" in call.name.lower()]
    for call in prepares:
        for argument in call.node.args:
            made = _made(module, argument)
            if made is not None and _counts_one_process(module, made, [prepare.node for prepare in prepares]):
                yield call.node


def _steps_once(accelerator: ast.Call) -> bool:
    """Return whether an Accelerator is told to step schedulers once, not once per process."""
    settings = {item.arg: item.value for item in accelerator.keywords}
    splits = settings.get("split_batches")
    is_split = splits is not None and not (isinstance(splits, ast.Constant) and splits.value is False)
    return is_split or "step_scheduler_with_optimizer" in settings or "dataloader_config" in settings


def _counts_one_process(module: SourceModule, made: ast.Call, prepares: list[ast.Call]) -> bool:
    """Return whether the length of a schedule counts the optimizer steps of this run."""
    expressions = traced(module, made)
    if any(_divides_by_ranks(value) for value in expressions):
        return True
    if any(_RANKS & names_in(value) for value in expressions):
        return False
    if lengths := [node for value in expressions for node in lengths_in(value)]:
        return any(_prepared_before(module, length, prepare) for length in lengths for prepare in prepares)
    counted = {_last(argument) for argument in _arguments(made)} - {""}
    return bool(counted & _loop_bounds(module))


def _divides_by_ranks(value: ast.expr) -> bool:
    """Return whether a number of steps is that of all ranks, divided by their number, and nowhere multiplied by it."""
    products = [node for node in ast.walk(value) if isinstance(node, ast.BinOp)]
    below = [node.right for node in products if isinstance(node.op, ast.Div | ast.FloorDiv)]
    divided = {id(inner) for part in below for inner in ast.walk(part)}
    named = [node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute) and _last(node) in _RANKS]
    return bool(named) and all(id(node) in divided for node in named)


def traced(module: SourceModule, made: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, and what they were set from: `total` from `per_epoch` from `len(loader)`."""
    expressions = _arguments(made)
    wanted = {name for argument in expressions for name in _names_outside_len(argument)}
    for function in (one for name in sorted(wanted) for one in functions_named(module, name)):
        wanted |= names_in(function)  # a closure: `LambdaLR(optimizer, ramp)`
    for _ in range(3):
        values = list(assignments(function_around(module, made)))
        sources = [
            value for names, value in values if names & wanted and value.lineno < made.lineno and _is_number(value)
        ]
        expressions += [value for value in sources if value not in expressions]
        wanted |= {name for value in sources for name in _names_outside_len(value)}
    return expressions


def _is_number(value: ast.expr) -> bool:
    """Return whether an expression is arithmetic, not an object that is made."""
    if isinstance(value, ast.Call):
        return _last(value.func) in ("len", "int", "max", "min", "ceil", "floor", "round")
    return not isinstance(value, ast.Tuple | ast.List | ast.Dict | ast.Lambda)


def _loop_bounds(module: SourceModule) -> set[str]:
    """Return the names of what a training loop counts to: `while step < STEPS`, `range(STEPS)`."""
    bounds: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.While) and isinstance(node.test, ast.Compare) and trains(module, node):
            bounds |= {_last(side) for side in node.test.comparators}
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _last(node.iter.func) == "range":
            steps = any(call.last == "step" for call in calls_in(module, node))
            has_inner = any(isinstance(inner, ast.For) for item in node.body for inner in ast.walk(item))
            bounds |= {_last(side) for side in node.iter.args} if steps and not has_inner else set()
    return bounds - {""}


def _prepared_before(module: SourceModule, length: ast.Call, prepare: ast.Call) -> bool:
    """Return whether a loader had been set by `prepare` when its length was taken."""
    statement = next((outer for outer in module.around(prepare) if isinstance(outer, ast.Assign)), None)
    is_same_scope = function_around(module, prepare) is function_around(module, length)
    if statement is None or not is_same_scope or prepare.lineno >= length.lineno:
        return False
    return bool(names_in(length.args[0]) & {name for target in statement.targets for name in names_in(target)})


def _made(module: SourceModule, argument: ast.expr) -> ast.Call | None:
    candidates = [argument, *_values(module, _last(argument))]
    return next((value for value in candidates if isinstance(value, ast.Call) and makes_schedule(module, value)), None)


def makes_schedule(module: SourceModule, value: ast.expr) -> bool:
    """Return whether an expression makes a learning-rate schedule."""
    if not isinstance(value, ast.Call):
        return False
    name = module.name_of(value.func)
    own = functions_named(module, name) if name not in module.aliases.values() else []
    if any(isinstance(node, ast.Return) and _is_schedule(module, node.value) for one in own for node in ast.walk(one)):
        return True
    return (
        "lr_scheduler" in name or "schedule" in name.rpartition(".")[2].lower() or name.endswith(("LR", "LROnPlateau"))
    )


def _is_schedule(module: SourceModule, value: ast.expr | None) -> bool:
    name = module.name_of(value.func) if isinstance(value, ast.Call) else ""
    return "lr_scheduler" in name or name.endswith(("LR", "LROnPlateau"))


def _values(module: SourceModule, name: str) -> list[ast.expr]:
    return [value for names, value in assignments(module.tree) if name and name in names]


def _counts_epochs(length: ast.expr) -> bool:
    text = ast.unparse(length).lower()
    return "epoch" in text and not any(word in text for word in ("len(", "step", "batch", "iter", "loader"))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(item.value for item in call.keywords)]


def lengths_in(value: ast.expr) -> list[ast.Call]:
    """Return the calls of `len` in an expression."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call) and node.args]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "len"]


def _names_outside_len(value: ast.expr) -> set[str]:
    return names_in(value) - {name for call in lengths_in(value) for name in names_in(call)}


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
