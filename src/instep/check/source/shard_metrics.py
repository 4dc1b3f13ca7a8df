"""Where the source computes a metric of samples that this rank alone has evaluated, and that no collective has seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.source.collective_calls import is_collective, is_distributed
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
from instep.check.source.local_metrics import DEPTH, Walk, has_all_data
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import syncs
from instep.check.source.whole_metrics import is_whole

_OWN = re.compile(r"auc|auroc|f1|accuracy|precision|recall|score|bleu|rouge|wer|iou|rmse|correlation|ndcg|mrr", re.I)
_LIBRARY = ("sklearn.metrics.", "scipy.stats.", "seqeval.metrics.", "sacrebleu.", "torcheval.metrics.functional.")
_FILLS = ("append", "extend")


def shard_metrics(module: SourceModule) -> Iterator[Call]:
    """Yield calls of metrics on lists that a loop has filled with this rank's outputs, if samples are divided."""
    if not is_distributed(module) or not divides_evaluation(module):
        return
    shared = _shared(module)
    for call in module.calls:
        if not _is_metric(module, call) or _becomes_shared(module, call, shared) or _has_all(module, call):
            continue
        walk = _ShardWalk(module, shared)
        given = [*call.node.args, *(item.value for item in call.node.keywords)]
        if any(next(walk.leaves(argument, "", DEPTH), "") for argument in given):
            yield call


def _has_all(module: SourceModule, call: Call) -> bool:
    """Return whether the function around a metric is always given loaders that nothing divides."""
    scope = function_around(module, call.node)
    sites = call_sites(module, scope) if isinstance(scope, Function) else []
    return bool(sites) and all(has_all_data(module, site) for site in sites)


class _ShardWalk(Walk):
    """A walk back to lists that are filled in a loop and mentioned in no collective."""

    def __init__(self, module: SourceModule, shared: set[str]) -> None:
        super().__init__(module)
        self._shared = shared

    def origins(self, nodes: list[ast.AST]) -> Iterator[str]:
        """Yield the lists of an expression that its function fills."""
        for node in nodes:
            if isinstance(node, ast.Name) and node.id not in self._shared and self._is_filled(node):
                yield node.id

    def measured(self, name: str, value: ast.expr | None) -> str:  # noqa: ARG002
        """Return nothing: only lists of outputs count."""
        return ""

    def _is_filled(self, node: ast.Name) -> bool:
        scope = function_around(self.module, node)
        fills = [
            call
            for call in calls_in(self.module, scope)
            if call.last in _FILLS and call.name.rpartition(".")[0] == node.id and call.node.args
            if any(isinstance(outer, ast.For) for outer in self.module.around(call.node))
        ]
        added = [inner for call in fills for inner in calls_in(self.module, call.node.args[0])]
        names = {name for call in fills for name in names_in(call.node.args[0])}
        return bool(fills) and not any(syncs(call) for call in added) and not names & self._shared


def _is_metric(module: SourceModule, call: Call) -> bool:
    """Return whether a call is of a metric: of a library, or of a function of this file that is called like one."""
    if is_whole(call) or call.name.startswith(_LIBRARY):
        return True
    own = [] if is_imported(module, call) else functions_named(module, call.last)
    is_pair = len(call.node.args) + len(call.node.keywords) >= 2
    if not own or any(is_collective(inner) for one in own for inner in calls_in(module, one)):
        return False
    return is_pair and bool(_OWN.search(call.last)) and isinstance(call.node.func, ast.Name)


def _becomes_shared(module: SourceModule, call: Call, shared: set[str]) -> bool:
    """Return whether the result of a call is brought together: averaged, which is another mistake, or broadcast."""
    around = [outer for outer in module.around(call.node) if isinstance(outer, ast.Call)]
    if any(is_collective(module.call_of[outer]) or syncs(module.call_of[outer]) for outer in around):
        return True
    scope = function_around(module, call.node)
    names = {name for targets, value in assignments(scope) if call.node in set(ast.walk(value)) for name in targets}
    return bool(names & shared)


def _shared(module: SourceModule) -> set[str]:
    """Return the variables that a collective mentions, and those that are set from such or by such."""
    shared: set[str] = set()
    for call in module.calls:
        if is_collective(call) or (syncs(call) and not call.last.startswith("synchronize")):
            given = [*call.node.args, *(item.value for item in call.node.keywords)]
            shared |= {inner.id for argument in given for inner in ast.walk(argument) if isinstance(inner, ast.Name)}
    for targets, value in assignments(module.tree):
        if any(is_collective(call) or syncs(call) for call in calls_in(module, value)):
            shared |= targets
    return shared - {"model", "device", "rank", "world_size", "self", "dist", "torch", *module.aliases}


def divides_evaluation(module: SourceModule) -> bool:
    """Return whether a file gives each rank a part of what is evaluated: a sampler without shuffling, or a slice."""
    for call in module.calls_of("DistributedSampler"):
        shuffle = call.argument("shuffle", 3)
        if isinstance(shuffle, ast.Constant) and shuffle.value is False:
            return True
    if len(list(module.calls_of("DistributedSampler"))) > 1 or any(True for _ in module.calls_of("prepare")):
        return True
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.expr)]
    return any(takes_part(node) and not takes_chunk(node) for node in nodes)
