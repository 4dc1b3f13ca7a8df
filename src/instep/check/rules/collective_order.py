"""collective-order: ranks that issue collectives in different orders, or only some of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from instep.check.collective_mismatch import agreed_places, mismatches
from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled
from instep.check.rule import Rule
from instep.check.source.collective_calls import has_group, is_collective
from instep.check.source.functions import assignments, calls_in
from instep.check.source.local_conditions import local_collectives
from instep.check.source.module import Call, SourceModule
from instep.check.source.rank_guards import RankGuard, rank_guard, rank_test


class CollectiveOrder(Rule):
    """Compares the collectives of the ranks, call by call, and reads which ones are under a condition on the rank."""

    id = "collective-order"
    severity = Severity.ERROR
    effect = "Ranks wait for one another for ever, or combine values that do not belong together."
    watches: ClassVar = {CollectiveCalled: "a collective of the script's own"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield where the ranks' collectives part."""
        local = {place for module in modules for place in local_collectives(module)}
        for mismatch in mismatches(observed):
            if mismatch.place not in local:  # these are reported as rank-dependent-collective
                message = "The ranks do not issue the same collectives in the same order."
                fix = "Issue every collective on all ranks, in the same order."
                yield self.finding(mismatch.place, message, mismatch.text, fix)

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse collectives that all ranks issued."""
        return observed.world_size > 1 and finding.place in agreed_places(observed)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield collectives that only some ranks issue, in another order, or in the order of a set."""
        guarded = [
            (call, guard)
            for call in module.calls
            if is_collective(call) and not has_group(call) and (guard := rank_guard(module, call.node)) is not None
        ]
        for call, guard in guarded:
            if not _has_counterpart(call, guard, guarded):
                yield self._guarded(module, call, guard)
        yield from self._branches(module)
        for loop, call in _loops_over_sets(module):
            yield self.finding(
                module.place(loop),
                "Collectives are issued in the order of a set, which differs between processes.",
                f"`{module.line(loop.lineno)}` around `{module.line(call.node.lineno)}`",
                f"- for … in {ast.unparse(loop.iter)}:\n+ for … in sorted({ast.unparse(loop.iter)}):",
                Severity.WARNING,
            )

    def _guarded(self, module: SourceModule, call: Call, guard: RankGuard) -> Finding:
        who = "rank 0 issues" if guard.is_main else "the ranks other than 0 issue"
        return self.finding(
            module.place(call.node),
            f"Only {who} {call.last}, and wait{'s' if guard.is_main else ''} for the others for ever.",
            f"`{module.line(call.node.lineno)}` under `{ast.unparse(guard.node).splitlines()[0]}`",
            f"Move {call.last} out of the condition, so that all ranks issue it.",
        )

    def _branches(self, module: SourceModule) -> Iterator[Finding]:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.If) or not node.orelse or rank_test(module, node.test) is None:
                continue
            first, second = (_texts(module, branch) for branch in (node.body, node.orelse))
            if first != second and sorted(first) == sorted(second):
                yield self.finding(
                    module.place(node),
                    "The branches issue the same collectives in different orders.",
                    f"{' then '.join(first)}; otherwise {' then '.join(second)}",
                    "Issue them in the same order on all ranks.",
                )


def _has_counterpart(call: Call, guard: RankGuard, guarded: list[tuple[Call, RankGuard]]) -> bool:
    """Return whether the other ranks issue the same collective elsewhere, as around a download by rank 0."""
    return any(other.last == call.last and its.is_main != guard.is_main for other, its in guarded)


def _texts(module: SourceModule, branch: list[ast.stmt]) -> list[str]:
    calls = [call for item in branch for call in calls_in(module, item) if is_collective(call)]
    return [f"{call.last}({ast.unparse(call.node.args[0]) if call.node.args else ''})" for call in calls]


def _loops_over_sets(module: SourceModule) -> Iterator[tuple[ast.For, Call]]:
    sets = _names_of_sets(module)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.For):
            continue
        is_set = _is_set(node.iter) or (isinstance(node.iter, ast.Name) and node.iter.id in sets)
        if is_set and (calls := [call for call in calls_in(module, node) if is_collective(call)]):
            yield node, calls[0]


def _names_of_sets(module: SourceModule) -> set[str]:
    """Return the variables that hold sets, without those that never have more than the one element they begin with."""
    grown = {call.name.rpartition(".")[0] for call in module.calls_of("add", "update")}
    grown |= {ast.unparse(node.target) for node in ast.walk(module.tree) if isinstance(node, ast.AugAssign)}
    return {
        name
        for names, value in assignments(module.tree)
        for name in names
        if _is_set(value) or (isinstance(value, ast.Set) and name in grown)
    }


def _is_set(value: ast.expr) -> bool:
    """Return whether an expression makes a set that may have an order: not `{one}`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("set", "frozenset")
    if isinstance(value, ast.Set):
        return len(value.elts) > 1 or isinstance(value.elts[0], ast.Starred)
    return isinstance(value, ast.SetComp)
