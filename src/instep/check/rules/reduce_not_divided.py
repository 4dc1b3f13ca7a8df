"""reduce-not-divided: a sum over the ranks that is reported as a mean, divided by one rank's count, or summed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import CollectiveCalled
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.half_reduced import half_reduced_ratios, sums_of_sums
from instep.check.source.module import SourceModule
from instep.check.source.undivided_sums import UndividedSum, extremes_as_means, undivided_sums


class ReduceNotDivided(Rule):
    """Follows the variable that a reduction has summed, to where it is printed."""

    id = "reduce-not-divided"
    severity = Severity.WARNING
    effect = "The reported value is the world size times too large; runs on different numbers of ranks do not compare."
    watches: ClassVar = {CollectiveCalled: "a collective of the script's own"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield sums that were reported as means, with the values that went into one."""
        for module in modules:
            for undivided in undivided_sums(module):
                values = _values(observed, module.place(undivided.node))
                if values:
                    text = ", ".join(f"rank {rank}: {value:.6g}" for rank, value in values.items())
                    mean = sum(values.values()) / len(values)
                    evidence = f"{text}; their sum {sum(values.values()):.6g} is reported, the mean is {mean:.6g}"
                    yield self._report(module, undivided, evidence)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield sums that are reported as means."""
        for undivided in undivided_sums(module):
            yield self._report(
                module, undivided, f"`{module.line(undivided.node.lineno)}`: nothing divides it afterwards"
            )
        if not is_distributed(module):
            return
        for call, name, operation in extremes_as_means(module):
            yield self.finding(
                module.place(call),
                f"`{name}` is reduced by {operation}, and reported as if it were a mean.",
                f"`{module.line(call.lineno)}`",
                "Sum it, and divide by the number of ranks: op=dist.ReduceOp.SUM.",
            )
        for ratio, summed, count in half_reduced_ratios(module):
            yield self.finding(
                module.place(ratio),
                "A sum over all ranks is divided by a count of this rank alone.",
                f"`{module.line(ratio.lineno)}`: `{summed}` was summed over the ranks, and `{count}` was not",
                "Sum both over the ranks, or neither, before dividing.",
            )
        for call, name in sums_of_sums(module):
            yield self.finding(
                module.place(call),
                f"`{name}` is summed over the ranks in place and goes on counting: next time the sum is summed again.",
                f"`{module.line(call.lineno)}`: nothing in the loop sets `{name}` anew",
                f"- dist.all_reduce({name})\n+ total = {name}.clone()\n+ dist.all_reduce(total)",
            )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2

    def _report(self, module: SourceModule, undivided: UndividedSum, evidence: str) -> Finding:
        return self.finding(
            module.place(undivided.node),
            f"`{undivided.name}` is summed over the ranks, and reported as if it were a mean.",
            evidence,
            f"+ {undivided.name} /= dist.get_world_size()  # or op=dist.ReduceOp.AVG, with nccl",
        )


def _values(observed: Observed, place: tuple[str, int]) -> dict[int, float]:
    """Return what each rank gave to the first reduction at a place; empty: not all ranks made it."""
    values: dict[int, float] = {}
    for rank, calls in enumerate(observed.by_rank(CollectiveCalled)):
        own = [call.value for call in calls if (call.file, call.line) == place and call.value is not None]
        if own:
            values[rank] = own[0]
    return values if len(values) == observed.world_size > 1 else {}
