"""Where the source makes learning-rate schedules, and in which unit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.source.functions import assignments, function_around, names_in
from instep.check.source.module import SourceModule

_IN_EPOCHS = {"CosineAnnealingLR": ("T_max", 1), "StepLR": ("step_size", 1), "MultiStepLR": ("milestones", 1)}
"""The argument of a scheduler that counts its steps."""


def is_scheduler(module: SourceModule, node: ast.expr) -> bool:
    """Return whether an expression is a learning-rate scheduler: by its name, or by what it was set to."""
    name = _last(node)
    return "sched" in name.lower() or any(_makes_schedule(module, value) for value in _values(module, name))


def made_in_epochs(module: SourceModule, node: ast.expr) -> ast.Call | None:
    """Return the call that makes a scheduler whose length counts epochs; None: it counts something else."""
    for value in _values(module, _last(node)):
        if isinstance(value, ast.Call) and (found := _IN_EPOCHS.get(_last(value.func))) is not None:
            name, position = found
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
            if made is not None and _length_of_prepared(module, made, [prepare.node for prepare in prepares]):
                yield call.node


def _steps_once(accelerator: ast.Call) -> bool:
    """Return whether an Accelerator is told to step schedulers once, not once per process."""
    return any(
        item.arg in ("split_batches", "step_scheduler_with_optimizer", "dataloader_config")
        for item in accelerator.keywords
    )


def _length_of_prepared(module: SourceModule, made: ast.Call, prepares: list[ast.Call]) -> bool:
    scope = function_around(module, made)
    wanted, expressions = {name for argument in _arguments(made) for name in names_in(argument)}, list(_arguments(made))
    for _ in range(3):  # `total_steps` from `steps_per_epoch` from `len(loader)`
        found = [value for names, value in assignments(scope) if names & wanted and value.lineno <= made.lineno]
        expressions += found
        wanted |= {name for value in found for name in names_in(value)}
    if any("num_processes" in names_in(value) or "world_size" in names_in(value) for value in expressions):
        return False
    lengths = [node for value in expressions for node in ast.walk(value) if _is_len(node)]
    return any(_prepared_before(module, length, prepare) for length in lengths for prepare in prepares)


def _prepared_before(module: SourceModule, length: ast.Call, prepare: ast.Call) -> bool:
    """Return whether a loader had been set by `prepare` when its length was taken."""
    statement = next((outer for outer in module.around(prepare) if isinstance(outer, ast.Assign)), None)
    if statement is None or prepare.lineno >= length.lineno:
        return False
    return bool(names_in(length.args[0]) & {name for target in statement.targets for name in names_in(target)})


def _made(module: SourceModule, argument: ast.expr) -> ast.Call | None:
    candidates = [argument, *_values(module, _last(argument))]
    return next((value for value in candidates if isinstance(value, ast.Call) and _makes_schedule(module, value)), None)


def _makes_schedule(module: SourceModule, value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = module.name_of(value.func)
    return (
        "lr_scheduler" in name or "schedule" in name.rpartition(".")[2].lower() or name.endswith(("LR", "LROnPlateau"))
    )


def _values(module: SourceModule, name: str) -> list[ast.expr]:
    return [value for names, value in assignments(module.tree) if name and name in names]


def _counts_epochs(length: ast.expr) -> bool:
    text = ast.unparse(length).lower()
    return "epoch" in text and not any(word in text for word in ("len(", "step", "batch", "iter", "loader"))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(item.value for item in call.keywords)]


def _is_len(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and bool(node.args)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
