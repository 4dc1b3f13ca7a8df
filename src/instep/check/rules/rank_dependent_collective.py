"""rank-dependent-collective: control flow that may lead ranks past a collective that others wait in."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.collective_mismatch import mismatches
from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.passes import is_data_parallel, training_passes
from instep.check.records.collectives import CollectiveCalled
from instep.check.records.replicas import Joined
from instep.check.records.run import OptimizerStepped
from instep.check.rule import Rule
from instep.check.source.collective_calls import has_group, is_collective, is_distributed
from instep.check.source.functions import calls_below, functions_named, loops_around, trains
from instep.check.source.local_clocks import clock_decisions
from instep.check.source.local_conditions import (
    collectives_in_handlers,
    collectives_over_local_keys,
    collectives_under_local_conditions,
    decided_by_one_rank,
    local_collectives,
)
from instep.check.source.loops import module_of, statement_at
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import rank_guard
from instep.check.source.skipped_backwards import skipped_backwards


class RankDependentCollective(Rule):
    """Reads conditions on a rank's own data around collectives, and compares what the ranks issued."""

    id = "rank-dependent-collective"
    severity = Severity.WARNING
    effect = "As soon as the ranks take different ways, some wait in a collective that the others never issue."
    watches: ClassVar = {CollectiveCalled: "a collective of the script's own"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield conditions by which the ranks have parted."""
        places = {place for module in modules for place in local_collectives(module)}
        for mismatch in mismatches(observed):
            if mismatch.place in places:
                message = "The ranks took different ways around a collective, by their own data."
                yield self.finding(mismatch.place, message, mismatch.text, _FIX, Severity.ERROR)
        if is_data_parallel(observed) and not observed.has(Joined):
            yield from self._different_steps(observed, modules)

    def _different_steps(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterator[Finding]:
        """Yield that ranks made different numbers of updates before the same batch, with the same optimizers."""
        if len({frozenset(step.optimizer for step in steps) for steps in observed.by_rank(OptimizerStepped)}) > 1:
            return
        for group in training_passes(observed):
            for batches in zip(*(one.batches for one in group), strict=False):
                steps = [batch.step - one.batches[0].step for batch, one in zip(batches, group, strict=True)]
                if len(set(steps)) > 1 and batches[0].batch > 0:
                    place = _own_loop(observed, modules)
                    made = ", ".join(f"{step} steps on rank {rank}" for rank, step in enumerate(steps))
                    yield self.finding(
                        place,
                        "The ranks make different numbers of optimizer steps for the same number of batches.",
                        f"before batch {batches[0].batch + 1} of a pass: {made}",
                        "Let all ranks make the same steps: agree on what decides about them first (all_reduce it).",
                        Severity.ERROR,
                    )
                    return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield collectives, and turns of a training loop, that depend on a rank's own data or on its rank."""
        for item in collectives_under_local_conditions(module):
            yield self.finding(
                module.place(item.missed),
                "A collective is issued only if this rank's own data says so.",
                f"`{module.line(item.missed.lineno)}` under `if {ast.unparse(item.node.test)}`",
                _FIX,
            )
        for loop, call in collectives_over_local_keys(module):
            yield self.finding(
                module.place(call.node),
                "A collective is issued for each key that this rank's own data has: ranks may have different ones.",
                f"`{module.line(call.node.lineno)}` in `{module.line(loop.lineno)}`",
                "Agree on the keys first (all_gather_object), or reduce one tensor with a place for every key.",
            )
        if not is_distributed(module):
            if any("transformers" in name for name in module.aliases.values()):
                yield from self._by_clock(module)
            return
        for handler, call in collectives_in_handlers(module):
            yield self.finding(
                module.place(call.node),
                "A collective is issued in an exception handler: only the ranks that failed call it.",
                f"`{module.line(call.node.lineno)}` under `{module.line(handler.lineno)}`",
                "Move it behind the try statement, where all ranks pass; or let the exception end the process.",
            )
        for skip in skipped_backwards(module):
            yield self.finding(
                module.place(skip.node),
                _NOT_UPDATED if skip.updates else _SKIPPED,
                f"`{module.line(skip.node.lineno)}` under `{skip.condition}`",
                "Agree on the condition first (all_reduce it), or let the rank go through backward with a zero loss.",
            )
        yield from self._by_clock(module)
        yield from self._by_rank(module)

    def _by_clock(self, module: SourceModule) -> Iterator[Finding]:
        """Yield loops that each rank leaves, or saves in, when its own clock or a signal tells it to."""
        for decision in clock_decisions(module):
            what = "leave the training loop" if decision.stops else "issue collectives"
            yield self.finding(
                module.place(decision.node),
                f"Each rank decides by its own clock, memory or signal when to {what}: not at the same step.",
                f"`{ast.unparse(decision.node.test)}` depends on {decision.origin}, and no collective agrees on it",
                "Let rank 0 decide, and broadcast the decision; or all_reduce it with MAX, in every step.",
            )

    def _by_rank(self, module: SourceModule) -> Iterator[Finding]:
        """Yield functions with collectives that only some ranks call, and loops that only some ranks leave."""
        for call, inner in _guarded_functions(module):
            yield self.finding(
                module.place(call.node),
                f"Only some ranks call {call.last}, which issues {inner.last}.",
                f"`{module.line(call.node.lineno)}` leads to line {inner.node.lineno}",
                f"Call {call.last} on all ranks, and put the condition around what only one rank should do.",
            )
        for leaving, condition in decided_by_one_rank(module):
            yield self.finding(
                module.place(leaving),
                "A training loop is left by a flag that only some ranks set; the others wait for their gradients.",
                f"`{module.line(condition.lineno)}`, and `{ast.unparse(condition.test)}` is set on some ranks only",
                "Broadcast the flag to all ranks before it is used.",
            )
        for node in ast.walk(module.tree):
            leaves = isinstance(node, ast.Break | ast.Continue) and _is_under_guard(module, node)
            if leaves and any(trains(module, loop) for loop in loops_around(module, node)):
                assert isinstance(node, ast.stmt)
                yield self.finding(
                    module.place(node),
                    "Only some ranks leave a training loop here; the others wait for their gradients.",
                    f"`{module.line(node.lineno)}` under a condition on the rank",
                    "Let one rank decide, and broadcast the decision to all.",
                )


def _own_loop(observed: Observed, modules: Sequence[SourceModule]) -> tuple[str, int]:
    """Return the condition nearest to the optimizer's step: of a `while`, or an `if`; else the step itself."""
    steps = [step for steps in observed.by_rank(OptimizerStepped) for step in steps if step.file]
    place = (steps[0].file, steps[0].line) if steps else ("", 0)
    module = module_of(modules, place[0])
    statement = statement_at(module, place[1]) if module is not None else None
    if module is None or statement is None:
        return place
    for outer in module.around(statement):
        if isinstance(outer, ast.While | ast.If):
            return module.place(outer)
        if isinstance(outer, ast.For | ast.FunctionDef):
            break
    return place


_SKIPPED = "A rank skips its backward pass if its own data says so; the others wait for its gradients."
_NOT_UPDATED = "A rank skips its update if its own data says so; the others make theirs, and the replicas drift apart."
_FIX = "Issue the collective on all ranks: put the condition on what it gives, not around it."


def _guarded_functions(module: SourceModule) -> Iterator[tuple[Call, Call]]:
    """Yield calls under a condition on the rank, with a collective that the called function of this file issues."""
    for call in module.calls:
        if not isinstance(call.node.func, ast.Name) or rank_guard(module, call.node) is None:
            continue
        functions = functions_named(module, call.last)
        if len(functions) != 1:
            continue
        inner = (
            below
            for below in calls_below(module, functions[0])
            if is_collective(below) and not has_group(below) and rank_guard(module, below.node) is None
        )
        if (first := next(inner, None)) is not None:
            yield call, first


def _is_under_guard(module: SourceModule, node: ast.AST) -> bool:
    """Return whether an `if` on the rank, inside the loop, is around a statement."""
    loop = next(loops_around(module, node), None)
    guard = rank_guard(module, node)
    return loop is not None and guard is not None and guard.node in set(ast.walk(loop))
