"""Rule per-rank-batch: the batch size counts for each rank, and nothing in the recipe follows from their number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observation, Observed
from instep.check.passes import LoaderPass, is_data_parallel, training_passes
from instep.check.records.data import PassBegan
from instep.check.rule import Rule
from instep.check.source.loops import module_of
from instep.check.source.module import Call, SourceModule
from instep.check.source.names import mentions, shares_input

_WORLD = re.compile(r"world|num_processes|nproc|n_?gpus|num_gpus|num_replicas|device_count|num_devices|dp_size")
_RECIPE = re.compile(r"\blr\b|learning_rate|batch|\bbs\b|accum")
_AWARE = re.compile(r"per_(device|rank|gpu|process|worker|replica)|local_|micro|device_batch")


class PerRankBatch(Rule):
    """Notes that more processes mean larger batches, where the script adapts neither batch size nor learning rate."""

    id = "per-rank-batch"
    severity = Severity.NOTE
    effect = "On another number of processes the same command trains another recipe: fewer and larger steps."
    watches: ClassVar[dict[type[Observation], str]] = {PassBegan: "a DataLoader"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield the first training loader whose batch size does not depend on the number of ranks."""
        if not is_data_parallel(observed) or shares_input(modules) or _is_adapted(modules):
            return
        for group in training_passes(observed):
            made, world_size = group[0].made, observed.world_size
            if made.batch_size and made.num_drawn * 2 <= made.length * 1.5 and not made.is_iterable:
                place, size = _batch_size(modules, group[0])
                yield self.finding(
                    place,
                    f"batch_size={made.batch_size} is the batch of one rank: {world_size} ranks use "
                    f"{made.batch_size * world_size} samples in a step.",
                    f"each of {world_size} ranks yields batches of {made.batch_size}, and neither batch size nor "
                    "learning rate depends on their number",
                    f"- batch_size={size}\n+ batch_size={size} // world_size  # or scale the learning rate",
                )
                return


def _is_adapted(modules: Sequence[SourceModule]) -> bool:
    """Return whether the number of ranks enters the batch size or the learning rate, or the author thought of it."""
    if mentions(modules, "TrainingArguments", "split_batches", "LightningModule"):
        return True
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.BinOp | ast.AugAssign) and _WORLD.search(ast.unparse(node).lower()):
                statement = next((outer for outer in module.around(node) if isinstance(outer, ast.stmt)), node)
                if _RECIPE.search(ast.unparse(statement).lower()):
                    return True
        sizes = [ast.unparse(call.argument("batch_size", 1) or call.node) for call in _loaders(module)]
        if any(_AWARE.search(size) or _WORLD.search(size.lower()) for size in sizes):
            return True
        if _assigns_by_world(module, set(sizes)):
            return True
    return False


def _assigns_by_world(module: SourceModule, names: set[str]) -> bool:
    """Return whether one of these variables is computed from the number of ranks."""
    assigned = [node for node in ast.walk(module.tree) if isinstance(node, ast.Assign)]
    return any(
        ast.unparse(target) in names and _WORLD.search(ast.unparse(node.value).lower()) is not None
        for node in assigned
        for target in node.targets
    )


def _loaders(module: SourceModule) -> Iterable[Call]:
    return [call for call in module.calls_of("DataLoader") if call.argument("batch_size", 1) is not None]


def _batch_size(modules: Sequence[SourceModule], one: LoaderPass) -> tuple[tuple[str, int], str]:
    """Return the line that gives the batch size, and its words there."""
    module = module_of(modules, one.made.file)
    for call in _loaders(module) if module is not None else ():
        size = call.argument("batch_size", 1)
        if module is not None and size is not None and call.node.lineno <= one.made.line <= (call.node.end_lineno or 0):
            words = ast.unparse(size)
            return module.place(size), f"({words})" if isinstance(size, ast.BinOp | ast.IfExp | ast.BoolOp) else words
    return one.place, str(one.made.batch_size)
