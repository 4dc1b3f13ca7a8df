"""batchnorm-not-synced: BatchNorm statistics that drift apart between the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.model_state import NormEntered
from instep.check.replication import are_replicas
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_collective, is_distributed
from instep.check.source.functions import Function, assignments, calls_in, function_around, names_in
from instep.check.source.module import Call, SourceModule
from instep.check.source.reaching import definitions

_FIX = (
    "+ model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
    "  model = DDP(model)  # on a CPU: without broadcast_buffers=False"
)
_OPTIONS = ("broadcast_buffers", "forward_sync_buffers")
_WRAPPERS = ("DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")


class BatchNormNotSynced(Rule):
    """Compares the running statistics of BatchNorm across ranks, before each training step and each evaluation."""

    id = "batchnorm-not-synced"
    severity = Severity.WARNING
    effect = (
        "Each rank normalises with its own statistics: it evaluates another model, and a checkpoint holds one rank's."
    )
    watches: ClassVar = {NormEntered: "a BatchNorm layer"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield BatchNorm layers whose statistics differ between ranks."""
        if not are_replicas(observed):
            return
        training, num_trained = _differing(observed, training=True)
        evaluated, num_evaluated = _differing(observed, training=False)
        is_averaged = num_evaluated > 0 and not evaluated  # before each evaluation, as timm does
        is_averaged |= not evaluated and any(_averages_buffers(module) for module in modules)  # later, by hand
        if is_averaged or (len(training) < 2 and not evaluated):
            return
        seen = []
        if training:
            seen.append(f"before {len(training)} of {num_trained} training steps")
        if evaluated:
            seen.append(f"in {len(evaluated)} of {num_evaluated} evaluations")
        shown = (evaluated or training)[0]
        yield self.finding(
            _wrapped_at(modules) or (shown.file, shown.line),
            "The running statistics of BatchNorm differ between the ranks.",
            f"they differed {' and '.join(seen)}",
            _FIX,
            Severity.ERROR if training and evaluated else None,
        )

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse wrappers if the statistics were seen to be the same on all ranks."""
        if "anew" in finding.message:
            return observed.world_size < 2
        differing, compared = _differing(observed, training=True)
        return compared > 1 and not differing

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield wrappers that do not broadcast buffers around BatchNorm, and statistics of one rank's part."""
        for call in module.calls_of("update_bn") if is_distributed(module) and not _averages_buffers(module) else ():
            loader = call.argument("loader", 0)
            if loader is not None and _is_divided(module, loader):
                yield self.finding(
                    module.place(call.node),
                    "The statistics of BatchNorm are computed anew, on each rank from its own part of the data.",
                    f"`{module.line(call.node.lineno)}`: `{ast.unparse(loader)}` is divided over the ranks",
                    "for b in model.buffers(): dist.all_reduce(b); b /= world_size  # of floating-point buffers",
                )
        has_norm = any("BatchNorm" in call.last and "Sync" not in call.last for call in module.calls)
        if not has_norm or any(True for _ in module.calls_of("convert_sync_batchnorm")):
            return
        for call in module.calls_of(*_WRAPPERS):
            if any(_is_false(call.argument(name)) for name in _OPTIONS) and not _averages_buffers(module):
                yield self.finding(
                    module.place(call.node),
                    "With broadcast_buffers=False nothing keeps the statistics of BatchNorm the same on all ranks.",
                    f"`{module.line(call.node.lineno)}`",
                    _FIX,
                )


def _differing(observed: Observed, training: bool) -> tuple[list[NormEntered], int]:
    """Return rank 0's entries whose statistics another rank did not have, and how many were compared."""
    ranks = [
        {entry.step: entry for entry in reversed(entries) if entry.training == training}
        for entries in observed.by_rank(NormEntered)
    ]
    steps = sorted(set.intersection(*(set(rank) for rank in ranks))) if len(ranks) > 1 else []
    differing = [ranks[0][step] for step in steps if len({rank[step].statistics for rank in ranks}) > 1]
    return differing, len(steps)


def _wrapped_at(modules: Sequence[SourceModule]) -> tuple[str, int] | None:
    calls = [(module, call) for module in modules for call in module.calls_of(*_WRAPPERS)]
    calls.sort(key=lambda item: not any(item[1].argument(name) for name in _OPTIONS))
    return calls[0][0].place(calls[0][1].node) if calls else None


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_divided(module: SourceModule, loader: ast.expr) -> bool:
    """Return whether a loader has a sampler that divides the data, as far as the file shows what it is made of."""
    divided = [
        call.node for call in module.calls if call.last == "DataLoader" and _has_distributed_sampler(module, call)
    ]
    if isinstance(loader, ast.Name) and (values := [one.value for one in definitions(module.tree, loader.id)]):
        made = {inner for value in values for inner in ast.walk(value)}
        callees = {inner.id for inner in made if isinstance(inner, ast.Name)}
        bodies = [function for name in callees for function in module.functions.get(name, [])]
        inside = made | {inner for body in bodies for inner in ast.walk(body)}
        return any(node in inside for node in divided)
    return bool(divided)


def _has_distributed_sampler(module: SourceModule, call: Call) -> bool:
    sampler = call.argument("sampler")
    if sampler is None:
        return False
    values = [sampler, *(value for names, value in assignments(module.tree) if names & names_in(sampler))]
    return any(inner.last == "DistributedSampler" for value in values for inner in calls_in(module, value))


def _averages_buffers(module: SourceModule) -> bool:
    """Return whether a file has to do with buffers itself, as `distribute_bn` of timm, or reduces the statistics."""
    if any(call.last in ("buffers", "named_buffers", "distribute_bn") for call in module.calls):
        return True
    functions = {function_around(module, call.node) for call in module.calls if is_collective(call)}
    names = {name for scope in functions if isinstance(scope, Function) for name in names_in(scope)}
    given = {name for call in module.calls if is_collective(call) for name in names_in(call.node)}
    return bool((names | given) & {"running_mean", "running_var"})
