"""Ranks step with different gradients for the same parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.differences import (
    UNWRAPPED,
    Cause,
    Difference,
    describe,
    differences,
    differences_by_cause,
    named,
)
from instep.check.records.gradients import CommHookRegistered, ModelWrapped, OptimizerBuilt, StepTaken, WrapperChanged
from instep.check.records.run import Ended
from instep.check.records.timeline import steps_together, wrappers_of
from instep.check.replication import are_connected
from instep.check.rule import Rule
from instep.check.source.gradient_averages import averages_of_gradients
from instep.check.source.module import SourceModule
from instep.check.source.weight_sums import replaced_weights

_UNFINISHED = "Expected to have finished reduction in the prior iteration"


class GradientsDiffer(Rule):
    """Finds gradients that nothing makes equal, and parameters that a forward pass leaves out."""

    id = "gradients-differ"
    severity = Severity.ERROR
    effect = "The replicas drift apart: what is evaluated and saved on one rank was trained on a part of the data."
    watches = {StepTaken: "an optimizer step"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield what differs inside wrapped models, outside of them, and what DistributedDataParallel refused."""
        unused = list(self._unused(observed))
        yield from unused
        if not unused:  # else a reduction was left unfinished, and gradients are what they were before it
            yield from self._wrapped(observed)
        if are_connected(observed):
            yield from self._unwrapped(observed, modules)

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield weights of one rank that take the place of the others' in each step."""
        for call in replaced_weights(module):
            yield self.finding(
                module.place(call.node),
                "Rank 0's weights replace those of the others in training: what the others have learnt is lost.",
                f"`{module.line(call.node.lineno)}`, and nothing brings gradients together",
                "dist.all_reduce(p.grad); p.grad /= world_size  # before optimizer.step, instead",
                Severity.WARNING,
            )

    def excuses(self, observed: Observed, finding: Finding) -> bool:  # noqa: ARG002
        """Excuse runs on one rank."""
        return observed.world_size < 2

    def _wrapped(self, observed: Observed) -> Iterable[Finding]:
        hooked = {hook.wrapper for hooks in observed.by_rank(CommHookRegistered) for hook in hooks}
        for (wrapper, cause), differing in differences_by_cause(observed).items():
            if cause is Cause.UNKNOWN and wrapper not in hooked:
                yield self.finding(
                    differing[0].steps[0].place,
                    "Ranks step with different gradients for parameters that DistributedDataParallel takes care of.",
                    describe(differing, _num_steps(observed)),
                    "Look for what changes gradients, or adds to them, after the backward pass, by rank.",
                )

    def _unwrapped(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        by_optimizer: dict[int, list[Difference]] = {}
        for difference in differences(observed):
            if difference.wrapper == UNWRAPPED:
                by_optimizer.setdefault(difference.steps[0].taken.optimizer, []).append(difference)
        for optimizer, differing in by_optimizer.items():
            if not _drifts(observed, optimizer):
                continue
            others = len(wrappers_of(observed)) > 0
            yield self.finding(
                (None if others else _averaged_at(modules))
                or _built(observed, optimizer)
                or differing[0].steps[0].place,
                _message(differing[0], others),
                describe(differing, _num_steps(observed)),
                "Make them a part of the module that is wrapped, or wrap their module in DistributedDataParallel too.",
                Severity.ERROR if others else Severity.WARNING,
            )

    def _unused(self, observed: Observed) -> Iterable[Finding]:
        if any(change.how == "added" for changes in observed.by_rank(WrapperChanged) for change in changes):
            return  # the rule parameters-changed-after-wrapping knows better
        wrapped = [wrapper for wrappers in observed.by_rank(ModelWrapped) for wrapper in wrappers]
        for ended in (end for ends in observed.by_rank(Ended) for end in ends):
            if _UNFINISHED in ended.error and wrapped:
                names = _unused_names(ended.error, wrapped[-1])
                yield self.finding(
                    (wrapped[-1].file, wrapped[-1].line),
                    f"A forward pass did not use all parameters ({names}), and DistributedDataParallel waits for them.",
                    ended.error[:300],
                    "Remove the parameters, or pass find_unused_parameters=True.",
                )
                return


def _num_steps(observed: Observed) -> int:
    return len(observed.by_rank(StepTaken)[0]) if observed.world_size else 0


def _message(difference: Difference, others: bool) -> str:
    what = named(difference.names) if difference.names else "parameters"
    if others:
        return f"The optimizer also trains {what} outside the wrapped model: their gradients are not reduced."
    return f"Each rank trains {what} on its own gradients: nothing makes the replicas equal."


def _drifts(observed: Observed, optimizer: int) -> bool:
    """Return whether unwrapped parameters began equal on all ranks, and were never equal again.

    Parameters that begin different are different on purpose: shards, stages, experts. Those that become equal again
    are averaged now and then: local SGD.
    """
    key = str(UNWRAPPED)
    equal = [
        len({step.taken.parameter_hash.get(key) for step in steps}) == 1
        for steps in steps_together(observed)
        if steps[0].taken.optimizer == optimizer
    ]
    return len(equal) >= 3 and equal[0] and not any(equal[1:])


def _built(observed: Observed, optimizer: int) -> tuple[str, int] | None:
    built = (event for event in observed.by_rank(OptimizerBuilt)[0] if event.optimizer == optimizer and event.file)
    return next(((event.file, event.line) for event in built), None)


def _averaged_at(modules: Sequence[SourceModule]) -> tuple[str, int] | None:
    """Return the line that averages gradients by hand, and leaves some of them out; None: no line does."""
    averages = [(module, call) for module in modules for call in averages_of_gradients(module)]
    return averages[0][0].place(averages[0][1].node) if averages else None


def _unused_names(error: str, wrapped: ModelWrapped) -> str:
    """Return the names of the parameters whose indices an error lists."""
    listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error)
    indices = [int(index) for index in listed[1].split()] if listed else []
    names = [wrapped.names[index] for index in indices if index < len(wrapped.names)]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "") if names else "the error lists them"
