"""handle-not-waited: an asynchronous collective whose result is used before it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled, HandlesMade
from instep.check.rule import Rule
from instep.check.source.async_handles import unwaited_calls
from instep.check.source.early_reads import early_reads
from instep.check.source.module import SourceModule

_WAITED = 0.8
"""A script that waits one step later has not waited for the last handles when it ends."""


class HandleNotWaited(Rule):
    """Counts handles that are made and waited for, and reads what becomes of each."""

    id = "handle-not-waited"
    severity = Severity.ERROR
    effect = "The tensor is read or overwritten while the collective still works on it: values are wrong now and then."
    watches: ClassVar = {CollectiveCalled: "a collective of the script's own"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield lines whose handles are not waited for."""
        why = {module.place(call.node): text for module in modules for call, text in unwaited_calls(module)}
        totals: dict[tuple[str, int], tuple[int, int]] = {}
        for records in observed.by_rank(HandlesMade):
            for one in records:
                made, waited = totals.get((one.file, one.line), (0, 0))
                totals[one.file, one.line] = made + one.num_made, waited + one.num_waited
        for place, (made, waited) in totals.items():
            if waited < _WAITED * made:
                text = f"; {why[place]}" if place in why else ""
                yield self._finding(place, f"{made - waited} of {made} handles were never waited for{text}")

    def excuses(self, observed: Observed, finding: Finding) -> bool:
        """Excuse lines whose handles were seen to be waited for."""
        return observed.has_at(HandlesMade, finding.place)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield asynchronous collectives whose handle is lost, and reads of what they fill before they are done."""
        for call, why in unwaited_calls(module):
            yield self._finding(module.place(call.node), f"`{module.line(call.node.lineno)}`: {why}")
        for read, started in early_reads(module):
            yield self.finding(
                module.place(read),
                f"`{started.buffer}` is read while an asynchronous collective still fills it.",
                f"`{module.line(read.lineno)}`: line {started.statement.lineno} starts the collective, and "
                f"`{started.handle}` is waited for later only",
                f"+ {started.handle}.wait()  # before {started.buffer} is read",
            )

    def _finding(self, place: tuple[str, int], evidence: str) -> Finding:
        return self.finding(
            place,
            "An asynchronous collective is started, and nothing waits until it is done.",
            evidence,
            "- dist.all_reduce(x, async_op=True)\n+ work = dist.all_reduce(x, async_op=True)\n+ work.wait()"
            "  # of each handle, before x is used",
        )
