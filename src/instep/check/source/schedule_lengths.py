"""Where a schedule's length counts the batches of all data, although each rank steps through its part only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.functions import names_in
from instep.check.source.module import SourceModule
from instep.check.source.schedule_calls import lengths_in, makes_schedule, traced

_RANKS = re.compile(
    r"world|num_processes|num_replicas|n_?gpus?|nprocs?|n_?ranks?|num_gpus?|global|dp_size|size\(\)", re.I
)
_BATCH = re.compile(r"batch|(^|_)bs($|_)|bsz|per_(device|rank|gpu)", re.IGNORECASE)


def undivided_lengths(module: SourceModule) -> Iterator[ast.Call]:
    """Yield calls that make a schedule whose length is that of the dataset divided by one rank's batch."""
    datasets = _divided_datasets(module)
    prepared = _prepared_loaders(module)
    for call in module.calls:
        if not makes_schedule(module, call.node):
            continue
        expressions = traced(module, call.node)
        if any(_RANKS.search(name) for value in expressions for name in names_in(value)):
            continue
        lengths = [(node, value) for value in expressions for node in lengths_in(value)]
        for length, value in lengths:
            measured = ast.unparse(length.args[0])
            is_data = measured in datasets or measured.endswith(".dataset")
            if is_data and datasets and any(_BATCH.search(name) for name in names_in(value)):
                yield call.node
                break
            if measured in prepared and length.lineno < prepared[measured] and not _is_prepared(module, call.node):
                yield call.node
                break


def _divided_datasets(module: SourceModule) -> set[str]:
    """Return the datasets that a DistributedSampler divides."""
    given = [call.argument("dataset", 0) for call in module.calls_of("DistributedSampler")]
    return {ast.unparse(data) for data in given if data is not None}


def _prepared_loaders(module: SourceModule) -> dict[str, int]:
    """Return what Accelerate prepares, with the line."""
    return {
        ast.unparse(argument): call.node.lineno
        for call in module.calls
        if call.last == "prepare"
        for argument in call.node.args
    }


def _is_prepared(module: SourceModule, made: ast.Call) -> bool:
    """Return whether a schedule is given to `prepare`, which makes its steps count for all ranks."""
    statement = next((outer for outer in module.around(made) if isinstance(outer, ast.Assign)), None)
    names = {ast.unparse(target) for target in statement.targets} if statement is not None else set()
    given = {ast.unparse(argument) for call in module.calls if call.last == "prepare" for argument in call.node.args}
    is_direct = any(
        isinstance(outer, ast.Call) and module.call_of[outer].last == "prepare" for outer in module.around(made)
    )
    return is_direct or bool(names & given) or not names
