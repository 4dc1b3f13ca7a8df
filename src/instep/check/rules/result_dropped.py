"""result-dropped: a collective whose result nobody reads, so that each rank goes on with its own value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.dropped_results import dropped_results
from instep.check.source.module import SourceModule


class ResultDropped(Rule):
    """Reads what collectives fill, and what becomes of it."""

    id = "result-dropped"
    severity = Severity.WARNING
    effect = "The ranks communicate, and each goes on with the value that it had before."
    watches: ClassVar = {CollectiveCalled: "a collective of the script's own"}

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield collectives whose result is lost."""
        if not is_distributed(module):
            return
        for node, what in dropped_results(module):
            yield self.finding(
                module.place(node),
                "The result of a collective is dropped.",
                f"`{module.line(node.lineno)}` puts it into {what}",
                "- dist.all_reduce(torch.tensor(hits))\n+ total = torch.tensor(hits)\n+ dist.all_reduce(total)"
                "  # and use total",
            )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2
